"""Tables of every benchmark: which figures of its record stand in which column, for people and in Markdown."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from bench.figures import Column, Figures
from bench.record import Record

THROUGHPUT, BATCH, SERVED_THROUGHPUT = "output throughput", "largest batch", "throughput through the server"
STEP_TIME, FAILED = "step time", "failed"
RECOMPUTED = "tokens computed again"
FORWARD_LAYOUT, BOTH_LAYOUTS = "refit, forward layout", "refit, both layouts"
DELTA, DELTA_WITH_GRADIENT = "largest difference to the scoring", "largest difference to the learning pass"
STEP, EAGER, ONE_THREAD, QUEUED, GRAPH = "step", "eager", "eager, one thread", "queued", "graph"  # linear's ways
NOT_MEASURED = "-"
Tables = Sequence[tuple[Column, ...]]

_ROOFLINE = Column("of the roofline", "share of the roofline", ".2f")
_LATENCY = (
    Column("first token p50, s", "time to first token, p50", ",.2f"),
    Column("p99", "time to first token, p99", ",.2f"),
    Column("between tokens p50, ms", "inter-token latency, p50", ",.1f"),
    Column("p90", "inter-token latency, p90", ",.1f"),
    Column("p99", "inter-token latency, p99", ",.1f"),
)
_SERVE: Tables = (
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
_RL: Tables = (
    (
        Column("output tokens/s", "output throughput", ",.0f"),
        Column("of bf16's", "throughput over bf16's", ".2f"),
        Column("of the roofline", "share of the roofline", ".2f"),
        Column("preemptions", "preemptions", ",.0f"),
        Column(RECOMPUTED, RECOMPUTED, ",.0f"),
        Column("KV tokens", "KV cache", ",.0f"),
        Column("J a token", "energy an output token", ".2f"),
    ),
    (
        Column("ms, both layouts", BOTH_LAYOUTS, ".2f"),
        Column("bytes' floor", BOTH_LAYOUTS, ".2f", "peer_value"),
        Column("forward layout alone", FORWARD_LAYOUT, ".2f"),
    ),
    (
        Column("s a step", STEP_TIME, ".2f"),
        Column("of bf16's", "time over bf16's", ".2f"),
        Column("of the inexact loop's", "time over the inexact loop's", ".2f"),
        Column("sampling, s", "time of sampling", ".2f"),
        Column("scoring", "time of scoring", ".2f"),
        Column("learning", "time of learning", ".2f"),
        Column("refit", "time of refit", ".2f"),
        Column("peak GiB", "peak memory", ",.0f"),
    ),
    (
        Column("nats to the scoring", DELTA, ".1e"),
        Column("to the learning pass", DELTA_WITH_GRADIENT, ".1e"),
        Column("tokens", "tokens compared", ",.0f"),
    ),
)
# Of each benchmark: a table is of the cases that have its first column.
TABLES: dict[str, Tables] = {
    "gemm": (
        (
            Column("TFLOP/s", "rate", ",.0f"),
            Column("bf16", "rate", ",.0f", "peer_value"),
            _ROOFLINE,
            Column("relative error", "relative error", ".1e"),
        ),
    ),
    "quant": (
        (
            Column("GB/s", "bandwidth", ",.0f"),
            Column("copy", "bandwidth", ",.0f", "peer_value"),
            Column("share", "share of copy bandwidth", ".2f"),
        ),
    ),
    "linear": (
        (
            Column("µs, GPU", f"time, {QUEUED}", ",.0f"),
            Column("x, GPU", f"speedup, {QUEUED}", ".2f"),
            Column("x, in a step", f"speedup, {STEP}", ".2f"),
            Column("x, alone", f"speedup, {EAGER}", ".2f"),
            Column("x, alone, one thread", f"speedup, {ONE_THREAD}", ".2f"),
            Column("x, graph", f"speedup, {GRAPH}", ".2f"),
            _ROOFLINE,
        ),
    ),
    "layer": (
        (
            Column("ms", "time", ".2f"),
            Column("x", "speedup", ".2f"),
            Column("saved for backward, MiB", "saved for backward", ",.0f"),
            _ROOFLINE,
        ),
    ),
    "step": (
        (
            Column("ms", STEP_TIME, ".1f"),
            Column("x", "speedup", ".2f"),
            Column("tokens/s", "throughput", ",.0f"),
            Column("peak GiB", "peak memory", ".1f"),
            Column("of bf16's", "peak memory over bf16's", ".2f"),
            Column("J a step", "energy a step", ",.0f"),
            _ROOFLINE,
        ),
        (
            Column("x, FP8 AdamW over torch's", "speed over torch's AdamW", ".2f"),
            Column("memory over torch's", "peak memory over torch's AdamW", ".2f"),
        ),
        (Column("did not run", FAILED, ",.0f"),),
    ),
    "sizes": ((Column("ms", STEP_TIME, ".1f"), Column("x", "speedup", ".2f")),),
    "capacity": ((Column("most tokens a step", "most tokens a step", ",.0f"),),),
    "qdq": (
        (
            Column("µs", "time", ",.1f"),
            Column("x, over the pairs", "speedup over unfused", ".2f"),
            Column("x, over bf16", "speedup over bf16", ".2f"),
            Column("pairs' kernels left", "pairs' kernels left", ",.0f"),
            _ROOFLINE,
        ),
    ),
    "serve": _SERVE,
    "rl": _RL,
}


def tables_of(name: str, figures: Figures) -> Tables:
    """A benchmark's tables; capacity's metrics name the batch at which they were taken."""
    if name != "capacity":
        return TABLES[name]
    columns = TABLES[name][0]
    for heading, prefix in (("ms", "step time"), ("tokens/s", "throughput")):
        columns += tuple(Column(heading, metric, ",.0f") for metric in figures.metrics_starting(prefix))
    return (columns,)


def markdown_tables(name: str, figures: Figures) -> str:
    """All tables that the record has cases for."""
    return "\n\n".join(figures.table(*found) for found in _filled(figures, tables_of(name, figures)))


def format_results(record: Record, name: str, first_row: int = 0) -> str:
    """The same for people, a dash where there is no figure; of the record's rows from one on."""
    figures = Figures({"rows": record.rows[first_row:]})
    shown = []
    for columns, cases in _filled(figures, tables_of(name, figures)):
        headings = ("", *(column.heading for column in columns))
        rows = [(case, *(number(figures.value(case, c.metric, c.field), c.form) for c in columns)) for case in cases]
        shown.append(format_table(headings, rows))
    return "\n\n".join(shown)


def format_record(record: Record) -> str:
    """A record for people: a line a case, a column a metric, with low and high where a row has them."""
    rows = {(str(row["case"]), str(row["metric"])): row for row in record.rows}
    metrics = list(dict.fromkeys(metric for _, metric in rows))
    cells = [[case, *(_cell(rows.get((case, m))) for m in metrics)] for case in dict.fromkeys(case for case, _ in rows)]
    return format_table(("", *metrics), cells)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return NOT_MEASURED
    spread = "" if row["p20"] is None else f" ({row['p20']:.4g} to {row['p80']:.4g})"
    return f"{row['value']:.4g}{spread}"


def _filled(figures: Figures, tables: Tables) -> Iterator[tuple[tuple[Column, ...], list[str]]]:
    for columns in tables:
        cases = [case for case in figures.cases if figures.value(case, columns[0].metric) is not None]
        if cases:
            yield columns, cases


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One line a row; the first column is aligned left, the others right."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    lines = []
    for first, *others in (headings, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None, form: str = ".1f") -> str:
    """value in a format, or a dash where there is none.

    A value below 1 of which a fixed-point format leaves fewer than two digits is shown with two.
    """
    if value is None:
        return NOT_MEASURED
    shown = format(value, form)
    is_fixed, num_digits = form.endswith("f"), len(re.sub(r"\D", "", shown).lstrip("0"))
    if not is_fixed or num_digits >= 2 or not 0 < abs(value) < 1:
        return shown
    return format(value, "#.2g").rjust(len(shown))
