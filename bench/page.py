"""Fills docs/performance.md from records: each section's table and plot stand between two marks, and only where its
record exists.
"""

import re
from collections.abc import Callable
from pathlib import Path

from bench.figures import Column, Figures, markdown, split_case
from bench.plot import PLOTS
from bench.rl import report as rl_report
from bench.serve import report as serve_report
from bench.speed.linear import MAIN_SHAPES, ONE_THREAD, case_name
from bench.speed.speed_table import EAGER, STEP
from octavo.errors import ConfigError

_MARKED = re.compile(r"(<!-- record (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PLOT_FOLDER = "performance"


def update_page(records: Path, page: Path) -> list[Path]:
    """Write the sections of the page, and draw their plots beside it.

    Args:
        records: folder of the records. page: a Markdown file with the marks.
    Returns:
        The files written, the page last.
    Raises:
        ConfigError: no such page or folder, or a mark that no table belongs to. BackendError: without matplotlib.
    """
    if not page.is_file() or not records.is_dir():
        raise ConfigError(f"octavo bench plot needs a page and a folder of records, got {page} and {records}")
    text = page.read_text(encoding="utf-8")
    written = []
    for name in marked_sections(text):
        path = records / f"{name}.json"
        if path.is_file():
            target = page.parent / PLOT_FOLDER / f"{name}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            PLOTS[name](Figures.load(path), target)
            written.append(target)
    page.write_text(fill(text, records), encoding="utf-8")
    return [*written, page]


def marked_sections(text: str) -> list[str]:
    """Names of the records that a page has marks for."""
    return [match.group(2) for match in _MARKED.finditer(text)]


def fill(text: str, records: Path) -> str:
    """The page's text with every marked section as its record says, empty where there is no record."""

    def section(match: re.Match[str]) -> str:
        name, path = match.group(2), records / f"{match.group(2)}.json"
        if name not in TABLES:
            raise ConfigError(f"the page marks a section {name!r}; known: {', '.join(TABLES)}")
        body = f"\n{render(name, Figures.load(path))}\n\n" if path.is_file() else ""
        return f"{match.group(1)}{body}{match.group(3)}"

    return _MARKED.sub(section, text)


def render(name: str, figures: Figures) -> str:
    """A section's table, plot and source."""
    source = f"[{name}.json](../bench/records/{name}.json)"
    return (
        f"{TABLES[name](figures)}\n\n![{name}]({PLOT_FOLDER}/{name}.svg)\n\n"
        f"{figures.document['what']} {figures.provenance()} Record: {source}."
    )


_ROOFLINE = Column("of the roofline", "share of the roofline", ".2f")


def _gemm(figures: Figures) -> str:
    columns = [
        Column("TFLOP/s", "rate", ",.0f"),
        Column("bf16", "rate", ",.0f", "peer_value"),
        _ROOFLINE,
        Column("relative error", "relative error", ".1e"),
    ]
    return figures.table(columns, [case for case in figures.cases if split_case(case)[1] != "bf16"])


def _quant(figures: Figures) -> str:
    columns = [
        Column("GB/s", "bandwidth", ",.0f"),
        Column("copy", "bandwidth", ",.0f", "peer_value"),
        Column("share", "share of copy bandwidth", ".2f"),
    ]
    return figures.table(columns)


def _linear(figures: Figures) -> str:
    main = {case_name(shape) for shape in MAIN_SHAPES}
    columns = [
        Column("µs, GPU", "time, queued", ",.0f"),
        Column("x, GPU", "speedup, queued", ".2f"),
        Column("x, in a step", f"speedup, {STEP}", ".2f"),
        Column("x, alone", f"speedup, {EAGER}", ".2f"),
        Column("x, alone, one thread", f"speedup, {ONE_THREAD}", ".2f"),
        Column("x, graph", "speedup, graph", ".2f"),
        _ROOFLINE,
    ]
    return figures.table(columns, [case for case in figures.cases if split_case(case)[0] in main])


def _layer(figures: Figures) -> str:
    columns = [
        Column("ms", "time", ".2f"),
        Column("x", "speedup", ".2f"),
        Column("saved for backward, MiB", "saved for backward", ",.0f"),
        _ROOFLINE,
    ]
    return figures.table(columns)


def _step(figures: Figures) -> str:
    columns = [
        Column("ms", "step time", ".1f"),
        Column("x", "speedup", ".2f"),
        Column("tokens/s", "throughput", ",.0f"),
        Column("peak GiB", "peak memory", ".1f"),
        Column("of bf16's", "peak memory over bf16's", ".2f"),
        Column("J a step", "energy a step", ",.0f"),
        _ROOFLINE,
    ]
    return figures.table(columns)


def _sizes(figures: Figures) -> str:
    pairs = [split_case(case) for case in figures.cases]
    sizes, arms = list(dict.fromkeys(s for s, _ in pairs)), list(dict.fromkeys(a for _, a in pairs))
    rows = [[arm, *(_speedup(figures, f"{size} {arm}") for size in sizes)] for arm in arms]
    return markdown(["speedup", *sizes], rows)


def _speedup(figures: Figures, case: str) -> str:
    value = figures.value(case, "speedup")
    return "-" if value is None else f"{value:.2f}"


def _capacity(figures: Figures) -> str:
    columns = [Column("most tokens a step", "most tokens a step", ",.0f")]
    for heading, prefix, form in (("ms", "step time", ",.0f"), ("tokens/s", "throughput", ",.0f")):
        columns += [Column(heading, metric, form) for metric in figures.metrics_starting(prefix)]
    return figures.table(columns)


def _qdq(figures: Figures) -> str:
    columns = [
        Column("µs", "time", ",.1f"),
        Column("x, over the pairs", "speedup over unfused", ".2f"),
        Column("x, over bf16", "speedup over bf16", ".2f"),
        Column("pairs' kernels left", "pairs' kernels left", ",.0f"),
        _ROOFLINE,
    ]
    return figures.table(columns)


TABLES: dict[str, Callable[[Figures], str]] = {
    "gemm": _gemm,
    "quant": _quant,
    "linear": _linear,
    "layer": _layer,
    "step": _step,
    "sizes": _sizes,
    "capacity": _capacity,
    "qdq": _qdq,
    "serve": serve_report.markdown_tables,
    "rl": rl_report.markdown_tables,
}
