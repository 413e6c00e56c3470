"""The tables that `octavo bench serve` prints, and those that `octavo bench plot` writes into docs/performance.md."""

from collections.abc import Iterator, Sequence

from bench.figures import Column, Figures
from bench.record import Record
from bench.table import format_table, number

_LATENCY = (
    Column("first token p50, s", "time to first token, p50", ",.2f"),
    Column("p99", "time to first token, p99", ",.2f"),
    Column("between tokens p50, ms", "inter-token latency, p50", ",.1f"),
    Column("p90", "inter-token latency, p90", ",.1f"),
    Column("p99", "inter-token latency, p99", ",.1f"),
)
Tables = Sequence[tuple[Column, ...]]

# A table is of the cases that have its first column.
TABLES: Tables = (
    (
        Column("of the roofline", "share of the roofline", ".2f"),
        Column("output tokens/s", "output throughput", ",.0f"),
        Column("p20", "output throughput", ",.0f", "p20"),
        Column("p80", "output throughput", ",.0f", "p80"),
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
        Column("output tokens/s by the server", "throughput through the server", ",.0f"),
        *_LATENCY,
        Column("errors", "errors", ",.0f"),
    ),
    (
        Column("first batch, s", "first batch of a fresh process", ",.1f"),
        Column("second", "second batch of a fresh process", ",.1f"),
        Column("engine made, s", "engine made of a fresh process", ",.1f"),
        Column("tokens/s of the first", "throughput of the first batch", ",.0f"),
        Column("of the second", "throughput of the first batch", ",.0f", "peer_value"),
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
    (
        Column("max delta logprob, nats", "max |delta logprob|", ".3g"),
        Column("tokens", "tokens compared", ",.0f"),
        Column("mean logprob", "mean logprob", ".2f"),
        Column("preemptions", "preemptions", ",.0f"),
        Column("prefix-hit tokens", "prefix-cache hit tokens", ",.0f"),
        Column("chunked prompts", "chunked prompts", ",.0f"),
        Column("steps by CUDA graph", "steps by CUDA graph", ",.0f"),
        Column("sizes of M", "sizes of M", ",.0f"),
        Column("largest M", "largest M", ",.0f"),
        Column("rows of an expert", "largest rows of an expert", ",.0f"),
    ),
)


def markdown_tables(figures: Figures, tables: Tables = TABLES) -> str:
    """All tables that the record has cases for."""
    return "\n\n".join(figures.table(columns, cases) for columns, cases in _filled(figures, tables))


def format_results(record: Record, tables: Tables = TABLES) -> str:
    """The same for people, a dash where there is no figure."""
    figures = Figures({"rows": record.rows})
    shown = []
    for columns, cases in _filled(figures, tables):
        headings = ("", *(column.heading for column in columns))
        rows = [(case, *(number(figures.value(case, c.metric, c.field), c.form) for c in columns)) for case in cases]
        shown.append(format_table(headings, rows))
    return "\n\n".join(shown)


def _filled(figures: Figures, tables: Tables) -> Iterator[tuple[tuple[Column, ...], list[str]]]:
    """Tables with their cases."""
    for columns in tables:
        cases = [case for case in figures.cases if figures.value(case, columns[0].metric) is not None]
        if cases:
            yield columns, cases
