"""The learning sections of docs/rl.md from rows: `python -m bench.rl_matrix.report RESULTS...` writes everything.

RESULTS are the folders or files of JSON lines that bench.rl_matrix.matrix left; without any, plots and sections are
made again from the records. No figure on the page is typed by hand.
"""

import argparse
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.charts import plot_learning
from bench.figures import Figures, markdown
from bench.rl_matrix.results import aligned, load_runs, matrix_record
from bench.rl_matrix.variants import GROUPS, UNCORRECTED
from bench.training.convergence_report import Sections, fill
from bench.training.convergence_results import find_files, read_curves, save_as_measured, save_curves
from octavo.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
RECORDS, PAGE = ROOT / "bench" / "records", ROOT / "docs" / "rl.md"
# section of the page -> its record, of the groups that name it, and its heading
SECTIONS = {
    "learning": ("rl_matrix", "Learning, measured"),
    "corrections": ("rl_corrections", "Corrections compared, measured"),
    "corrections-cpu": ("rl_corrections_cpu", "Corrections compared on a CPU, measured"),
}
WITHIN_POINTS = 2.0  # of bf16's reward: what is asked of exact variants


def main(arguments: list[str] | None = None) -> int:
    """Write what the results give."""
    parser = argparse.ArgumentParser(prog="python -m bench.rl_matrix.report", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="folders or .jsonl files")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the records and their curves")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    for path in [*write_record(options.results, options.out), *write_page(options.out, options.page)]:
        print(path)
    return 0


def write_record(results: Iterable[Path], folder: Path) -> list[Path]:
    """The records and the curves of what was measured; nothing for results without a step. Trials have no say."""
    found = load_runs(find_files(results, "rl_matrix.jsonl"))
    written = []
    for record, _ in SECTIONS.values():
        runs = aligned({key: run for key, run in found.items() if GROUPS[key[0]].record == record})
        if runs:
            written.append(save_as_measured(matrix_record(record, runs), [run.about for run in runs.values()], folder))
            written.append(save_curves(folder / f"{record}_curves.json", (run.curve() for run in runs.values())))
    return written


def write_page(records: Path, page: Path) -> list[Path]:
    """Plots and the sections from the records.

    Raises:
        ConfigError: there is no such page, or it does not mark a section.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if unmarked := [name for name in SECTIONS if f"<!-- section {name} -->" not in text]:
        mark = f"<!-- section {unmarked[0]} -->"
        raise ConfigError(f"{page} must be a page with the line {mark} and <!-- end --> after it")
    written = []
    for group, curves in load_curves(records).items():
        path = page.parent / page.stem / f"learning_{group}.svg"
        plot_learning(path, curves, GROUPS[group].title)
        written.append(path)
    sections: Sections = {
        name: (record, functools.partial(make_section, heading=heading, plots=page.stem))
        for name, (record, heading) in SECTIONS.items()
    }
    page.write_text(fill(text, records, page.stem, sections), encoding="utf-8")
    return [*written, page]


def load_curves(records: Path) -> dict[str, list[dict[str, Any]]]:
    """Group -> its kept curves, of all records that are there."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for record, _ in SECTIONS.values():
        for curve in read_curves(records / f"{record}_curves.json"):
            curves.setdefault(curve["group"], []).append(curve)
    return curves


def make_section(figures: Figures, heading: str, plots: str) -> str:
    """A whole section: what was asked of the variants, a table and a plot a group, and what the runs were."""
    parts = [f"## {heading}", "\n\n".join(_verdicts(figures))]
    for group in _groups(figures):
        parts += [f"### {GROUPS[group].title}", _table(figures, group)]
        parts.append(f"![{GROUPS[group].title}]({plots}/learning_{group}.svg)")
    parts.append(
        "Gaps are in points (hundredths of the reward), of means over the seeds; thin lines are single seeds. Runs: "
        "`python -m bench.rl_matrix.matrix`; this section: `python -m bench.rl_matrix.report`. "
        f"{figures.document['what']} Measured on: {figures.provenance()}"
    )
    return "\n\n".join(parts)


def _groups(figures: Figures) -> list[str]:
    return list(dict.fromkeys(case.split()[0] for case in figures.cases))


def _variants(figures: Figures, group: str) -> list[str]:
    return [case for case in figures.cases if case.split()[0] == group and ", seed " not in case]


def _table(figures: Figures, group: str) -> str:
    base = GROUPS[group].base
    headings = ["variant", "held-out reward", "seeds from to", f"to {base}", f"sampled, to {base}", "steps", "failed"]
    headings += ["mean abs. difference, first and last steps", "largest of all", "s a step"]
    if group == "llama":
        headings += ["clipped", "flushed to zero"]
    if GROUPS[group].compares_corrections:
        headings += [f"to {base}, seeds from to", "mismatch KL (k3), first and last steps"]
    return markdown(headings, [_row(figures, case, group) for case in _variants(figures, group)])


def _row(figures: Figures, case: str, group: str) -> list[str]:
    def cell(metric: str, form: str, field: str = "value") -> str:
        value = figures.value(case, metric, field)
        return "-" if value is None else f"{value:{form}}"

    held_out, difference, kl = "held-out reward", "mean |delta logprob|, last steps", "mismatch KL (k3), last steps"
    gap = "gap to base, held-out"
    row = [
        case.split()[1],
        f"{cell(held_out, '.3f', 'peer_value')} -> {cell(held_out, '.3f')}",
        f"{cell(held_out, '.3f', 'p20')} to {cell(held_out, '.3f', 'p80')}",
        cell(gap, "+.1f"),
        cell("gap to base, sampled", "+.1f"),
        cell("steps", ".0f"),
        f"{cell('failed', '.0f')} of {cell('seeds', '.0f')}",
        f"{cell(difference, '.1e', 'peer_value')}, {cell(difference, '.1e')}",
        cell("max |delta logprob|, all steps", ".2g"),
        cell("time a step", ".2f"),
    ]
    if group == "llama":
        row += [cell(f"K or V {what}, largest share", ".1e") for what in ("clipped", "flushed to zero")]
    if GROUPS[group].compares_corrections:
        row.append(f"{cell(gap, '+.1f', 'p20')} to {cell(gap, '+.1f', 'p80')}")
        row.append(f"{cell(kl, '.1e', 'peer_value')}, {cell(kl, '.1e')}")
    return row


def _verdicts(figures: Figures) -> list[str]:
    exact = [_exact_verdict(figures, group) for group in _groups(figures)]
    compared = [_correction_verdict(figures, group) for group in _groups(figures) if GROUPS[group].compares_corrections]
    return [text for text in (*exact, *compared) if text]


def _exact_verdict(figures: Figures, group: str) -> str:
    """Whether a group's exact variant is exact and learns as bf16 does; empty where it has none."""
    case, title = f"{group} exact", f"{GROUPS[group].title}, exact"
    largest, gap = (figures.value(case, m) for m in ("max |delta logprob|, all steps", "gap to base, held-out"))
    if largest is None:
        return ""
    text = f"**logprobs differ by up to {largest:.2g}**"
    if largest == 0.0:
        text = "trainer's and sampler's logprobs are equal at every step of every seed"
    if gap is not None and GROUPS[group].base != "exact":
        state = "within" if abs(gap) <= WITHIN_POINTS else "above" if gap > 0 else "**not within**"
        text += f"; held-out reward {gap:+.1f} points from bf16's, {state} the {WITHIN_POINTS:g} that were asked"
    return f"{title}: {text}."


def _correction_verdict(figures: Figures, group: str) -> str:
    """Which variants fail, and what each costs against the base variant: by the rules of docs/rl.md."""
    base, title = GROUPS[group].base, GROUPS[group].title
    failed, costs = {}, []
    for case in _variants(figures, group):
        variant = case.split()[1]
        failed[variant] = (figures.value(case, "failed") or 0.0, figures.value(case, "seeds") or 0.0)
        gap, least, most = (figures.value(case, "gap to base, held-out", part) for part in ("value", "p20", "p80"))
        if variant == base or gap is None or least is None or most is None:
            continue
        kind = "a cost" if most < 0 else "a gain" if least > 0 else "not of one sign, so neither a cost nor a gain"
        costs.append(f"{variant} {gap:+.1f} ({least:+.1f} to {most:+.1f} by seed: {kind})")
    counts = ", ".join(f"{variant} {count:.0f} of {seeds:.0f}" for variant, (count, seeds) in failed.items())
    count, seeds = failed.get(UNCORRECTED, (0.0, 0.0))
    if seeds and count == seeds and failed.get(base, (1.0, 1.0))[0] == 0:
        sound = [variant for variant, (count, _) in failed.items() if count == 0 and variant != base]
        outcome = f"uncorrected rollouts **fail** here; what prevents it: {', '.join(sound) or 'nothing'}"
    else:
        outcome = "uncorrected rollouts do **not** fail here, so nothing here shows that a correction is needed"
    points = f" Points of held-out reward to {base}'s: {'; '.join(costs)}." if costs else ""
    return f"{title}, failed seeds: {counts}: {outcome}.{points}"


if __name__ == "__main__":
    sys.exit(main())
