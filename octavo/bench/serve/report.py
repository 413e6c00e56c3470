"""The tables that `octavo bench serve` prints, and those that `octavo bench plot` writes into docs/performance.md."""

from collections.abc import Iterator

from octavo.bench.figures import Column, Figures
from octavo.bench.table import format_table, number
from octavo.testing.bench import Record

_LATENCY = (
    Column("first token p50, s", "time to first token, p50", ",.2f"),
    Column("p99", "time to first token, p99", ",.2f"),
    Column("between tokens p50, ms", "inter-token latency, p50", ",.1f"),
    Column("p90", "inter-token latency, p90", ",.1f"),
    Column("p99", "inter-token latency, p99", ",.1f"),
)
# A table is of the cases that have its first column.
TABLES = (
    (
        Column("of the roofline", "share of the roofline", ".2f"),
        Column("output tokens/s", "output throughput", ",.0f"),
        Column("vLLM", "output throughput", ",.0f", "peer_value"),
        Column("all tokens/s", "total throughput", ",.0f"),
        *_LATENCY,
        Column("J a token", "energy an output token", ",.2f"),
    ),
    (
        Column("weights built, s", "weights built", ",.1f"),
        Column("engine made, s", "engine made", ",.1f"),
        Column("peak GiB of the build", "peak memory of the build", ",.1f"),
        Column("of the run", "peak memory", ",.1f"),
        Column("KV tokens", "KV cache", ",.0f"),
        Column("vLLM's", "KV cache", ",.0f", "peer_value"),
        Column("steps", "steps", ",.0f"),
        Column("preemptions", "preemptions", ",.0f"),
    ),
    (
        Column("sequences", "largest batch", ",.0f"),
        Column("of bf16's", "largest batch over bf16's", ",.2f"),
        Column("tokens/s of bf16's", "throughput over bf16's", ",.2f"),
    ),
    (Column("tokens/s of the fast mode's", "throughput over the fast mode's", ",.2f"),),
    (
        Column("goodput, requests/s", "goodput", ",.2f"),
        Column("output tokens/s", "output throughput", ",.0f"),
        *_LATENCY,
        Column("errors", "errors", ",.0f"),
    ),
    (
        Column("first token after, s", "process start to first token", ",.1f"),
        Column("start and imports", "start and imports, of that", ",.1f"),
        Column("load", "load, of that", ",.1f"),
        Column("request", "request, of that", ",.1f"),
        Column("peak GiB of the load", "peak memory of the load", ",.1f"),
        Column("weights in bf16", "peak memory of the load", ",.1f", "peer_value"),
    ),
    (
        Column("GB/s", "bandwidth", ",.0f"),
        Column("of a copy", "share of copy bandwidth", ".2f"),
    ),
    (Column("TFLOP/s", "attention rate", ",.0f"),),
)


def markdown_tables(figures: Figures) -> str:
    """All tables that the record has cases for."""
    return "\n\n".join(figures.table(columns, cases) for columns, cases in _filled(figures))


def format_results(record: Record) -> str:
    """The same for people, a dash where there is no figure."""
    figures = Figures({"rows": record.rows})
    tables = []
    for columns, cases in _filled(figures):
        headings = ("", *(column.heading for column in columns))
        rows = [(case, *(number(figures.value(case, c.metric, c.field), c.form) for c in columns)) for case in cases]
        tables.append(format_table(headings, rows))
    return "\n\n".join(tables)


def _filled(figures: Figures) -> Iterator[tuple[tuple[Column, ...], list[str]]]:
    """Tables with their cases."""
    for columns in TABLES:
        cases = [case for case in figures.cases if figures.value(case, columns[0].metric) is not None]
        if cases:
            yield columns, cases
