"""docs/convergence.md says what the records say, and the report makes records of results."""

import json
from pathlib import Path

import pytest

from bench.figures import Figures
from bench.training.convergence_report import PAGE, PLOTS, RECORDS, SECTIONS, fill, load_curves, main, write_page
from bench.training.convergence_results import load_runs, measure_gap
from octavo.errors import ConfigError

ABOUT = {"device": "a card", "torch": "2.11", "triton": None, "date": "2026-11-20", "commit": "abc"}
VARIANTS = ("bf16", "blockwise", "bf16-to-blockwise", "blockwise+fp8-optimizer")


def make_results(folder: Path, variants: tuple[str, ...] = VARIANTS, corpus: str = "some text, sha256 1") -> None:
    """Two seeds of some variants, each 1 % above the one before."""
    lines = []
    for seed in (0, 1):
        for place, variant in enumerate(variants):
            run, factor = f"50m-{variant}-s{seed}", 1.0 + 0.01 * place
            start = {
                "variant": variant,
                "seed": seed,
                "size": "50m",
                "num_params": 1000,
                "shape": [2, 128, 256],
                "steps": 40,
            }
            start |= {"tokens_per_step": 64, "seq_len": 32, "learning_rate": 0.1, "fp8_flop_share": float(place > 0)}
            start |= {"epochs": 0.5, "corpus": corpus, "side_by_side": 2, **ABOUT}
            end = {"loss": 2.0 * factor, "bf16_loss": 2.0 * factor, "batch_losses": [1.0 * factor, 3.0 * factor]}
            end |= {"num_tokens": 640, "tokens_per_s": 5.0, "peak_bytes": 2**30, "optimizer_bytes": 4060}
            scores = dict.fromkeys(("token", "identifier", "last_line", "addition", "sorting"), 0.25)
            rows = [{"kind": "start", **start}]
            rows += [{"kind": "steps", "step": s, "loss": [4.0 * factor] * 20, "seconds": 1.0} for s in (0, 20)]
            rows += [{"kind": "end", "step": 39, **end}, {"kind": "downstream", **scores}]
            lines += [json.dumps({"run": run, **row}) for row in rows]
    lines.append(json.dumps({"run": "50m-rowwise-s0", "kind": "start"}))  # one that has not ended
    (folder / "pretraining-50m.jsonl").write_text("\n".join(lines) + "\n")
    image = {"task": "shapes", "loss": 0.5, "num_params": 9, "fp8_flop_share": 0.9, "num_test": 10, **ABOUT}
    image["setting"] = {"layers": 1, "width": 2, "steps": 3, "batch": 4}
    runs = [(variant, seed, 0.9 + 0.01 * seed) for variant in ("bf16", "rowwise") for seed in (0, 1)]
    vision = [
        json.dumps({**image, "variant": variant, "seed": seed, "accuracy": right}) for variant, seed, right in runs
    ]
    (folder / "vision.jsonl").write_text("\n".join(vision) + "\n")


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
    assert "| blockwise | 2.020 | 7.54 | +1.00 % | +1.00 ± 0.50, +1.00 ± 0.50 | +1.00 % | 100 % |" in text
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
    plots = {path: path.read_bytes() for path in (tmp_path / "page").iterdir()}
    write_page(tmp_path / "records", page)
    assert page.read_text() == text
    assert {path: path.read_bytes() for path in plots} == plots


def test_variants_join_a_record(tmp_path: Path) -> None:
    make_results(tmp_path)
    page, records = tmp_path / "page.md", tmp_path / "records"
    page.write_text("")
    rest = ["--records", str(records), "--page", str(page)]
    main([str(tmp_path / "pretraining-50m.jsonl"), *rest])
    before = json.loads((records / "pretraining.json").read_text())
    curves = load_curves(records)
    later = tmp_path / "later"
    later.mkdir()
    make_results(later, ("bf16", "delayed", "mxfp8"))  # blockwise's place is delayed's here
    main([str(later / "pretraining-50m.jsonl"), "--add", *rest])
    after = json.loads((records / "pretraining.json").read_text())
    assert after["rows"][: len(before["rows"])] == before["rows"]
    assert {row["case"] for row in after["rows"][len(before["rows"]) :]} == {"50m delayed", "50m mxfp8"}
    figures = Figures.load(records / "pretraining.json")
    assert figures.value("50m mxfp8", "gap to bf16") == pytest.approx(2.0)
    assert load_curves(records)[: len(curves)] == curves
    assert {curve["variant"] for curve in load_curves(records)[len(curves) :]} == {"delayed", "mxfp8"}

    make_results(later, ("bf16", "mxfp8"))  # again, better
    main([str(later / "pretraining-50m.jsonl"), "--add", *rest])
    after = json.loads((records / "pretraining.json").read_text())
    assert after["rows"][: len(before["rows"])] == before["rows"]
    assert Figures.load(records / "pretraining.json").value("50m mxfp8", "gap to bf16") == pytest.approx(1.0)
    assert [(c["variant"], c["seed"]) for c in load_curves(records)].count(("mxfp8", 0)) == 1

    make_results(later, ("bf16", "nvfp4"), corpus="other text, sha256 2")
    with pytest.raises(ConfigError, match="run all variants again"):
        main([str(later / "pretraining-50m.jsonl"), "--add", *rest])
    assert json.loads((records / "pretraining.json").read_text()) == after


def test_variants_of_a_recipe_have_a_table_of_their_own_and_are_replaced_by_name(tmp_path: Path) -> None:
    page, records = tmp_path / "page.md", tmp_path / "records"
    page.write_text("".join(f"<!-- section {name} -->\n<!-- end -->\n" for name in SECTIONS))
    rest = ["--records", str(records), "--page", str(page)]
    make_results(tmp_path, ("bf16", "nvfp4", "nvfp4+last1", "nvfp4+stochastic_rounding=false", "nvfp4+last1-to-bf16"))
    main([str(tmp_path / "pretraining-50m.jsonl"), *rest])

    def section(name: str) -> str:
        return page.read_text().partition(f"<!-- section {name} -->")[2].partition("<!-- end -->")[0].strip()

    variants = (
        "nvfp4, last layer in bf16",
        "nvfp4, without stochastic rounding",
        "nvfp4, last layer in bf16, then bf16",
    )
    gaps = dict(zip(variants, ("+2.00 %", "+3.00 %", "+4.00 %"), strict=True))
    drawn = (tmp_path / "page" / "emulated.svg").read_text()
    for variant, gap in gaps.items():
        assert any(
            row.startswith(f"| {variant} | 2.0") and f"| {gap} |" in row for row in section("emulated").split("\n")
        )
        assert f">{variant}</text>" in drawn and f"| {variant} |" not in section("50m")
    assert "| nvfp4, last layer in bf16 (emulated) | 50m | +2.00 % | **outside the floor** |" in section("verdict")
    assert "without" not in section("verdict") and "then bf16" not in section("verdict")
    assert not section("switches")

    later = tmp_path / "later"
    later.mkdir()
    make_results(later, ("bf16", "nvfp4+last1"))  # better now
    main([str(later / "pretraining-50m.jsonl"), "--add", *rest])
    figures = Figures.load(records / "pretraining.json")
    found = [
        figures.value(f"50m {variant}", "gap to bf16") for variant in ("nvfp4", "nvfp4+last1", "nvfp4+last1-to-bf16")
    ]
    assert found == pytest.approx([1.0, 1.0, 4.0])
    assert sorted((c["variant"], c["seed"]) for c in load_curves(records) if "last1" in c["variant"]) == [
        *(("nvfp4+last1", seed) for seed in (0, 1)),
        *(("nvfp4+last1-to-bf16", seed) for seed in (0, 1)),
    ]


def test_a_gap_is_paired_by_seed(tmp_path: Path) -> None:
    make_results(tmp_path)
    runs = load_runs([tmp_path / "pretraining-50m.jsonl"])
    assert len(runs) == 8
    gap = measure_gap(runs["50m", "blockwise", 1], runs["50m", "bf16", 1])
    assert gap.percent == pytest.approx(1.0) and gap.error == pytest.approx(0.5)
    assert runs["50m", "bf16", 0].curve()["loss"] == [4.0, 4.0]


def test_unknown_marks_and_pages_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nothing'"):
        fill("<!-- section nothing -->\n<!-- end -->", tmp_path, "page")
    with pytest.raises(ConfigError, match="is none"):
        write_page(tmp_path, tmp_path / "missing.md")
