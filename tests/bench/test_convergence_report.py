"""docs/convergence.md says what the records say, and the report makes records of results."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.figures import Figures
from bench.training import convergence_report
from bench.training.convergence_report import PAGE, PLOTS, RECORDS, SECTIONS, fill, load_curves, main, write_page
from octavo.errors import ConfigError
from tests.assertions import assert_raises

ABOUT = {"device": "a card", "torch": "2.11", "triton": None, "date": "2026-11-20", "commit": "abc"}
VARIANTS = ("bf16", "blockwise", "bf16-to-blockwise", "blockwise+fp8-optimizer")


def make_results(folder: Path, variants: tuple[str, ...] = VARIANTS, corpus: str = "some text, sha256 1") -> None:
    """Two seeds of some variants, each 1 % above the one before."""
    start = ABOUT | {"size": "50m", "num_params": 1000, "shape": [2, 128, 256], "steps": 40, "tokens_per_step": 64}
    start |= {"seq_len": 32, "learning_rate": 0.1, "epochs": 0.5, "corpus": corpus, "side_by_side": 2}
    end = {"num_tokens": 640, "tokens_per_s": 5.0, "peak_bytes": 2**30, "optimizer_bytes": 4060}
    scores = dict.fromkeys(("token", "identifier", "last_line", "addition", "sorting"), 0.25)
    lines: list[dict[str, Any]] = [{"run": "50m-rowwise-s0", "kind": "start"}]  # one that has not ended
    for seed, (place, variant) in itertools.product((0, 1), enumerate(variants)):
        factor = 1.0 + 0.01 * place
        losses = {"loss": 2.0 * factor, "bf16_loss": 2.0 * factor, "batch_losses": [1.0 * factor, 3.0 * factor]}
        about = {"variant": variant, "seed": seed, "fp8_flop_share": float(place > 0)}
        rows = [{"kind": "start", **start, **about}]
        rows += [{"kind": "steps", "step": s, "loss": [4.0 * factor] * 20, "seconds": 1.0} for s in (0, 20)]
        rows += [{"kind": "end", "step": 39, **end, **losses}, {"kind": "downstream", **scores}]
        lines += [{"run": f"50m-{variant}-s{seed}", **row} for row in rows]
    write_lines(folder / "pretraining-50m.jsonl", lines)
    image = {"task": "shapes", "loss": 0.5, "num_params": 9, "fp8_flop_share": 0.9, "num_test": 10, **ABOUT}
    image["setting"] = dict.fromkeys(("layers", "width", "steps", "batch"), 2)
    runs = (("bf16", 0, 0.9), ("bf16", 1, 0.91), ("rowwise", 0, 0.9), ("rowwise", 1, 0.91))
    write_lines(
        folder / "vision.jsonl", [{**image, "variant": v, "seed": seed, "accuracy": right} for v, seed, right in runs]
    )


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_page_equals_the_records() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text, RECORDS, PAGE.stem) == text, "run `python -m bench.training.convergence_report`: a record changed"
    assert all(f"<!-- section {name} -->" in text for name in SECTIONS)
    for name, (wanted, _) in PLOTS.items():
        is_drawn = len({curve["variant"] for curve in load_curves(RECORDS) if wanted(curve)}) > 1
        assert (PAGE.parent / PAGE.stem / f"{name}.svg").is_file() == is_drawn


def test_results_become_records_plots_and_a_page(tmp_path: Path) -> None:
    make_results(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- section {name} -->\n<!-- end -->\n" for name in SECTIONS))
    assert main([str(tmp_path), "--records", str(tmp_path / "records"), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| blockwise | 2.020 | 7.54 | +1.00 % | +1.00 ± 0.50, +1.00 ± 0.50 | +1.00 % | 100 % |" in text  # by seed
    assert "| blockwise | 50m | +1.00 % | **outside the floor** |" in text
    assert "| 50m blockwise+fp8-optimizer | 4.06 | 2.060 | +3.00 |" in text
    assert "| shapes rowwise | 90.50 | 90.00 to 91.00 | 0.5000 | 90 % |" in text
    assert "a card, torch 2.11, triton None, commit abc, 2026-11-20." in text
    assert "rowwise | 2" not in text
    for name in ("50m", "switches", "optimizer"):
        assert f"(page/{name}.svg)" in text and (tmp_path / "page" / f"{name}.svg").is_file()
    figures = Figures.load(tmp_path / "records" / "pretraining.json")
    assert figures.value("50m blockwise", "addition after tuning") == 25.0
    assert figures.value("50m bf16", "spread of the seeds") == 0.0


def test_variants_join_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence_report, "plot_pretraining", lambda *_, **__: None)
    page, records, later = tmp_path / "page.md", tmp_path / "records", tmp_path / "later"
    page.write_text("")

    def join(folder: Path, *words: str) -> tuple[list[dict[str, Any]], Figures]:
        given = [str(folder / "pretraining-50m.jsonl"), *words]
        main([*given, "--records", str(records), "--page", str(page)])
        figures = Figures.load(records / "pretraining.json")
        return figures.document["rows"], figures

    make_results(tmp_path)
    before, _ = join(tmp_path)
    curves = load_curves(records)
    for variants, gap in ((("bf16", "delayed", "mxfp8"), 2.0), (("bf16", "mxfp8"), 1.0)):  # again, better
        make_results(later, variants)
        after, figures = join(later, "--add")
        assert after[: len(before)] == before and load_curves(records)[: len(curves)] == curves
        assert {row["case"] for row in after[len(before) :]} == {"50m delayed", "50m mxfp8"}
        assert figures.value("50m mxfp8", "gap to bf16") == pytest.approx(gap)
        known = [(c["variant"], c["seed"]) for c in load_curves(records)[len(curves) :]]
        assert sorted(known) == [(v, seed) for v in ("delayed", "mxfp8") for seed in (0, 1)]
    make_results(later, ("bf16", "nvfp4"), corpus="other text, sha256 2")
    assert_raises(ConfigError, "run all variants again", join, later, "--add")
    assert Figures.load(records / "pretraining.json").document["rows"] == after


def test_variants_of_a_recipe_have_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, dict[str, str]] = {}
    plot = lambda path, *_, labels, **__: drawn.update({path.stem: labels})  # noqa: E731
    monkeypatch.setattr(convergence_report, "plot_pretraining", plot)
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- section {name} -->\n<!-- end -->\n" for name in SECTIONS))
    make_results(tmp_path, ("bf16", "nvfp4", "nvfp4+last1", "nvfp4+stochastic_rounding=false", "nvfp4+last1-to-bf16"))
    main([str(tmp_path / "pretraining-50m.jsonl"), "--records", str(tmp_path / "records"), "--page", str(page)])
    parts = (part.partition(" -->") for part in page.read_text().split("<!-- section ")[1:])
    section = {name: text.partition("<!-- end -->")[0].strip() for name, _, text in parts}
    labels = ("last layer in bf16", "without stochastic rounding", "last layer in bf16, then bf16")
    for label, gap in zip(labels, ("+2.00 %", "+3.00 %", "+4.00 %"), strict=True):
        (row,) = (row for row in section["emulated"].split("\n") if row.startswith(f"| nvfp4, {label} | 2.0"))
        assert f"| {gap} |" in row and f"| nvfp4, {label} |" not in section["50m"]
        assert f"nvfp4, {label}" in drawn["emulated"].values()
    assert "| nvfp4, last layer in bf16 (emulated) | 50m | +2.00 % | **outside the floor** |" in section["verdict"]
    assert "without" not in section["verdict"] and "then bf16" not in section["verdict"]
    assert not section["switches"]


def test_unknown_marks_and_pages_are_named(tmp_path: Path) -> None:
    assert_raises(ConfigError, "'nothing'", fill, "<!-- section nothing -->\n<!-- end -->", tmp_path, "page")
    assert_raises(ConfigError, "is none", write_page, tmp_path, tmp_path / "missing.md")
