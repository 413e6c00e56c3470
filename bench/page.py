"""Fills docs/performance.md from records: each section's table and plot stand between two marks, and only where its
record exists.
"""

import re
from pathlib import Path

from bench.charts import PLOTS
from bench.figures import Figures, fill_marks, markdown, split_case
from bench.report import TABLES, markdown_tables
from bench.speed.linear import MAIN_SHAPES, case_name
from octavo.errors import ConfigError

PLOT_FOLDER = "performance"


def update_page(records: Path, page: Path) -> list[Path]:
    """Write the sections of the page, and draw their plots beside it.

    Args:
        records: folder of the records.
        page: a Markdown file with the marks.
    Returns:
        The files written, the page last.
    Raises:
        ConfigError: no such page or folder, or a mark that no table belongs to.
        BackendError: without matplotlib.
    """
    if not page.is_file() or not records.is_dir():
        raise ConfigError(f"octavo bench plot needs a page and a folder of records, got {page} and {records}")
    text = page.read_text(encoding="utf-8")
    filled = fill(text, records)  # before anything is written: it reads every record and knows every mark
    written = []
    for name in marked_sections(text):
        path = records / f"{name}.json"
        if path.is_file():
            target = page.parent / PLOT_FOLDER / f"{name}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            PLOTS[name](Figures.load(path), target)
            written.append(target)
    page.write_text(filled, encoding="utf-8")
    return [*written, page]


def marked_sections(text: str) -> list[str]:
    """Names of the records that a page has marks for."""
    return re.findall(r"<!-- record (\w+) -->\n", text)


def fill(text: str, records: Path) -> str:
    """The page's text with every marked section as its record says, empty where there is no record."""

    def section(name: str) -> str:
        path = records / f"{name}.json"
        return render(name, Figures.load(path)) if path.is_file() else ""

    return fill_marks(text, "record", TABLES, section)


def render(name: str, figures: Figures) -> str:
    """A section's table, plot and source."""
    source = f"[{name}.json](../bench/records/{name}.json)"
    return (
        f"{_table(name, figures)}\n\n![{name}]({PLOT_FOLDER}/{name}.svg)\n\n"
        f"{figures.document['what'].rstrip('.')}. {figures.provenance()} Record: {source}."
    )


def _table(name: str, figures: Figures) -> str:
    """A section's table; of some records it shows only a part of the cases, or sizes side by side."""
    if name == "sizes":
        return _sizes(figures)
    if name == "gemm":
        cases = [case for case in figures.cases if split_case(case)[1] != "bf16"]
    elif name == "linear":
        main = {case_name(shape) for shape in MAIN_SHAPES}
        cases = [case for case in figures.cases if split_case(case)[0] in main]
    else:
        return markdown_tables(name, figures)
    return figures.table(TABLES[name][0], cases)


def _sizes(figures: Figures) -> str:
    pairs = [split_case(case) for case in figures.cases]
    sizes, variants = (list(dict.fromkeys(part)) for part in zip(*pairs, strict=True))
    values = {(size, v): figures.value(f"{size} {v}", "speedup") for size in sizes for v in variants}
    rows = [[v, *("-" if (x := values[size, v]) is None else f"{x:.2f}" for size in sizes)] for v in variants]
    return markdown(["speedup", *sizes], rows)
