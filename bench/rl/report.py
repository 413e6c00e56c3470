"""The tables that `octavo bench rl` prints, and those that `octavo bench plot` writes into docs/performance.md."""

from bench.figures import Column, Figures
from bench.record import Record
from bench.rl.results import BOTH_LAYOUTS, DELTA, DELTA_WITH_GRADIENT, FORWARD_LAYOUT, RECOMPUTED, STEP_TIME
from bench.serve import report as serve_report

# A table is of the cases that have its first column.
TABLES: serve_report.Tables = (
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


def markdown_tables(figures: Figures) -> str:
    """All tables that the record has cases for."""
    return serve_report.markdown_tables(figures, TABLES)


def format_results(record: Record) -> str:
    """The same for people, a dash where there is no figure."""
    return serve_report.format_results(record, TABLES)
