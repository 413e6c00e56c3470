"""docs/convergence.md from records: `python -m bench.training.convergence_report RESULTS...` writes all of it.

RESULTS are the folders or files of JSON lines that bench.training.pretraining and bench.training.vision left; without
any, plots and page are made again from the records. No figure on the page is typed by hand.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.charts import plot_pretraining
from bench.figures import Figures, fill_marks, markdown
from bench.training.convergence_results import (
    BASE,
    NUDGED,
    SCORES,
    THIN,
    find_files,
    join_records,
    load_rows,
    load_runs,
    pretraining_record,
    read_curves,
    save_as_measured,
    save_curves,
    vision_record,
)
from bench.training.pretraining_variants import parse_variant
from octavo.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
RECORDS, PAGE = ROOT / "bench" / "records", ROOT / "docs" / "convergence.md"
CURVES = "pretraining_curves.json"
FLOOR_PERCENT, AIM_PERCENT = 0.5, 0.2


def main(arguments: list[str] | None = None) -> int:
    """Write what the results give."""
    parser = argparse.ArgumentParser(prog="python -m bench.training.convergence_report", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="folders or .jsonl files")
    parser.add_argument("--add", action="store_true", help="pretraining: add to the record's variants, or replace them")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    for path in write_records(options.results, options.records, add=options.add):
        print(path)
    for path in write_page(options.records, options.page):
        print(path)
    return 0


def write_records(results: Iterable[Path], folder: Path, *, add: bool = False) -> list[Path]:
    """The records of what was measured; nothing for results that hold no finished run.

    Args:
        add: variants join the pretraining record or replace those of their name; its other variants and its bf16 stay.
    """
    files = find_files(results, "*.jsonl")
    runs = load_runs(file for file in files if file.name.startswith("pretraining"))
    written = []
    if runs:
        starts = [run.start for run in runs.values()]
        curves = [run.curve() for run in runs.values()]
        earlier = None
        if add:
            earlier = json.loads((folder / "pretraining.json").read_text())
            known = load_curves(folder)
            names = {(curve["size"], curve["variant"]) for curve in known}
            curves = [c for c in curves if c["variant"] != BASE or (c["size"], c["variant"]) not in names]
            replaced = {(curve["size"], curve["variant"]) for curve in curves}
            curves = [c for c in known if (c["size"], c["variant"]) not in replaced] + curves
        path = save_as_measured(pretraining_record(runs), starts, folder)
        if earlier is not None:
            join_records(path, earlier)
        written += [path, save_curves(folder / CURVES, curves)]
    rows = load_rows(file for file in files if file.name.startswith("vision"))
    if rows:
        written.append(save_as_measured(vision_record(rows), rows, folder))
    return written


def write_page(records: Path, page: Path) -> list[Path]:
    """Plots and sections from the records.

    Raises:
        ConfigError: there is no such page, or it marks an unknown section.
    """
    if not page.is_file():
        raise ConfigError(f"the report fills the marks of a page, and {page} is none")
    written = []
    for name, (wanted, title) in PLOTS.items():
        curves = [curve for curve in load_curves(records) if wanted(curve)]
        if len({curve["variant"] for curve in curves}) > 1:
            path = page.parent / page.stem / f"{name}.svg"
            labels = {curve["variant"]: parse_variant(curve["variant"]).label for curve in curves}
            plot_pretraining(path, curves, title, base=BASE, labels=labels, points_of=THIN)
            written.append(path)
    page.write_text(fill(page.read_text(encoding="utf-8"), records, page.stem), encoding="utf-8")
    return [*written, page]


def load_curves(records: Path) -> list[dict[str, Any]]:
    """The kept curves, none where there is no record of them."""
    return read_curves(records / CURVES)


def fill(text: str, records: Path, plots: str, sections: "Sections | None" = None) -> str:
    """The page's text with every marked section as its record says, empty where there is none.

    Args:
        sections: the page's; None for those of docs/convergence.md.
    """
    known = SECTIONS if sections is None else sections

    def section(name: str) -> str:
        record, make = known[name]
        path = records / f"{record}.json"
        body = make(Figures.load(path)) if path.is_file() else ""
        return f"{body}\n\n![{PLOTS[name][1]}]({plots}/{name}.svg)" if body and name in PLOTS else body

    return fill_marks(text, "section", known, section)


def _is_main(variant: str) -> bool:
    """Of a size's own table: every recipe as it is throughout, and bf16's noise."""
    return parse_variant(variant).is_plain or variant == NUDGED


def _is_switch(variant: str) -> bool:
    """Of the table of runs that change their precision; one of an emulated recipe stands with the others of those."""
    return variant in (BASE, "blockwise") or (
        parse_variant(variant).later is not None and not parse_variant(variant).is_emulated
    )


def _is_of_emulated(variant: str) -> bool:
    """Of the emulated recipes' own table: as they are, with fields changed, with linears in other recipes."""
    return variant == BASE or (parse_variant(variant).is_emulated and "+fp8-optimizer" not in variant)


# the plots: which curves, and the title
PLOTS: dict[str, tuple[Callable[[dict[str, Any]], bool], str]] = {
    "50m": (lambda c: c["size"] == "50m" and _is_main(c["variant"]), "50M parameters"),
    "350m": (lambda c: c["size"] == "350m" and _is_main(c["variant"]), "350M parameters"),
    "switches": (
        lambda c: c["size"] == "50m" and c["seed"] == 0 and _is_switch(c["variant"]),
        "switching between bf16 and blockwise in the middle of a run",
    ),
    "emulated": (lambda c: c["size"] == "50m" and _is_of_emulated(c["variant"]), "the emulated recipes"),
    "optimizer": (
        lambda c: c["size"] == "50m" and (c["variant"] == BASE or "+fp8-optimizer" in c["variant"]),
        "FP8 optimizer state",
    ),
}


def _what(figures: Figures) -> str:
    return f"{figures.document['what']} Measured on: {figures.provenance()}"


def _variants(size: str, wanted: Callable[[str], bool]) -> Callable[[Figures], str]:
    def table(figures: Figures) -> str:
        cases = [case for case in figures.cases if case.startswith(f"{size} ") and wanted(case.split()[1])]
        if all(case.split()[1] == BASE for case in cases):
            return ""
        headings = ["variant", "loss", "perplexity", "gap to bf16", "seed by seed", "both in bf16", "linears in FP8"]
        text = markdown(headings, [_variant_row(figures, case) for case in cases])
        spread = figures.value(f"{size} {BASE}", "spread of the seeds")
        return text + (f"\n\nThe seeds of bf16 itself are {spread:.2f} % apart." if spread is not None else "")

    return table


def _variant_row(figures: Figures, case: str) -> list[str]:
    metrics = [m for m in figures.metrics_starting("gap to bf16, seed") if figures.value(case, m) is not None]
    seeds = [(figures.value(case, m), figures.value(case, m, "peer_value")) for m in metrics]
    return [
        _name(figures, case),
        _cell(figures.value(case, "validation loss"), ".3f"),
        _cell(figures.value(case, "held-out perplexity"), ".2f"),
        _cell(figures.value(case, "gap to bf16"), "+.2f", " %"),
        ", ".join(f"{value:+.2f} ± {error:.2f}" for value, error in seeds) or "-",
        _cell(figures.value(case, "gap to bf16, both in bf16"), "+.2f", " %"),
        "half the run" if "-to-" in case else _cell(figures.value(case, "linear FLOPs in FP8"), ".0f", " %"),
    ]


def _num_seeds(figures: Figures, case: str) -> int:
    metrics = figures.metrics_starting("gap to bf16, seed")
    return sum(figures.value(case, metric) is not None for metric in metrics)


def _name(figures: Figures, case: str, *, with_size: bool = False) -> str:
    """The variant; with the number of its seeds where others of its size have more, whose means are not its."""
    size, variant = case.split()
    most = max(_num_seeds(figures, other) for other in figures.cases if other.startswith(f"{size} "))
    mine = most if variant == BASE else _num_seeds(figures, case)
    label = parse_variant(variant).label
    name = f"{size} {label}" if with_size else label
    return name if mine == most else f"{name} ({mine} of {most} seeds)"


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _verdict(figures: Figures) -> str:
    """How every recipe stands to the floor and the aim, on all linears or on those that are named."""
    lines = []
    for case in figures.cases:
        size, name = case.split()
        variant = parse_variant(name)
        gap = figures.value(case, "gap to bf16")
        if gap is None or not (variant.is_one_precision and variant.keeps_recipe):
            continue
        state = "within the aim" if abs(gap) <= AIM_PERCENT else "within the floor"
        state = state if gap <= FLOOR_PERCENT else "**outside the floor**"
        state = state if gap >= -FLOOR_PERCENT else "below bf16, by more than the floor"
        lines.append(
            [f"{variant.label} (emulated)" if variant.is_emulated else variant.label, size, f"{gap:+.2f} %", state]
        )
    headings = ["recipe", "size", "gap to bf16", f"floor {FLOOR_PERCENT} %, aim {AIM_PERCENT} %"]
    return markdown(headings, lines) if lines else ""


def _optimizer(figures: Figures) -> str:
    cases = [c for c in figures.cases if c.split()[1] in (BASE, "blockwise") or "+fp8-optimizer" in c]
    metrics = (("optimizer state", ".2f"), ("validation loss", ".3f"), ("gap to bf16", "+.2f"))
    rows = [
        [_name(figures, c, with_size=True), *(_cell(figures.value(c, m), form) for m, form in metrics)] for c in cases
    ]
    if not any("+fp8-optimizer" in c for c in cases):
        return ""
    return markdown(["", "optimizer bytes a parameter", "loss", "gap to bf16, %"], rows)


def _downstream(figures: Figures) -> str:
    metrics = ["held-out perplexity", *SCORES.values()]
    cases = [case for case in figures.cases if figures.value(case, metrics[1]) is not None]
    if not cases:
        return ""
    rows = [[_name(figures, c), *(_cell(figures.value(c, m), ".2f") for m in metrics)] for c in cases]
    return markdown(["variant", "perplexity", *(f"{metric}, %" for metric in SCORES.values())], rows)


def _vision(figures: Figures) -> str:
    rows = [
        [
            case,
            _cell(figures.value(case, "accuracy"), ".2f"),
            f"{figures.value(case, 'accuracy', 'p20'):.2f} to {figures.value(case, 'accuracy', 'p80'):.2f}",
            _cell(figures.value(case, "test loss"), ".4f"),
            _cell(figures.value(case, "linear FLOPs in FP8"), ".0f", " %"),
        ]
        for case in figures.cases
    ]
    headings: Sequence[str] = ["task and variant", "accuracy, %", "seeds from to", "test loss", "linears in FP8"]
    return f"{markdown(headings, rows)}\n\n{_what(figures)}"


def _small(figures: Figures) -> str:
    metric = "paired difference to bf16, mean over seeds"
    rows = [
        [
            case,
            _cell(figures.value(case, "validation loss, mean over seeds"), ".3f"),
            _cell(figures.value(case, metric), "+.2f", " %"),
        ]
        for case in figures.cases
    ]
    return f"{markdown(['variant', 'loss', 'gap to bf16'], rows)}\n\n{_what(figures)}"


# section -> the record that it is made of, and how
Sections = dict[str, tuple[str, Callable[[Figures], str]]]
SECTIONS: Sections = {
    "setting": ("pretraining", _what),
    "verdict": ("pretraining", _verdict),
    "50m": ("pretraining", _variants("50m", _is_main)),
    "350m": ("pretraining", _variants("350m", _is_main)),
    "emulated": ("pretraining", _variants("50m", _is_of_emulated)),
    "switches": ("pretraining", _variants("50m", _is_switch)),
    "optimizer": ("pretraining", _optimizer),
    "downstream": ("pretraining", _downstream),
    "vision": ("vision", _vision),
    "small": ("convergence", _small),
}

if __name__ == "__main__":
    sys.exit(main())
