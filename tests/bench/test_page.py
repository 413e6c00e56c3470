"""docs/performance.md says what the records say, and `octavo bench plot` writes it."""

import re
import sys
from pathlib import Path

import pytest

from bench import BENCHMARKS
from bench.charts import PLOTS
from bench.figures import Figures
from bench.page import PLOT_FOLDER, _table, fill, marked_sections, update_page
from bench.record import Record
from bench.report import TABLES
from bench.speed.linear import WAYS
from octavo import cli
from octavo.errors import ConfigError, DataError

ROOT = Path(__file__).parent.parent.parent
PAGE, RECORDS = ROOT / "docs" / "performance.md", ROOT / "bench" / "records"
TEMPLATE = "# Title\n\n<!-- record {name} -->\n<!-- end -->\n\nrest\n"


def make_record(name: str, folder: Path) -> Path:
    """A record of every metric that a table of `name` shows."""
    record = Record(name, "What was measured.", device="cpu")
    cases = {
        "sizes": ["1B bf16, compiled", "1B octavo rowwise", "7B octavo rowwise"],
        "linear": ["16384x4096x14336 bf16", "16384x4096x14336 octavo rowwise", "512x1024x1024 octavo rowwise"],
        "gemm": ["16x16x16 bf16", "16x16x16 rowwise, fast"],
        "serve": ["8B: octavo bf16", "30B: octavo rowwise", "8B: octavo rowwise"],
    }
    metrics = [
        "step time",
        "speedup",
        "throughput",
        "peak memory",
        "peak memory over bf16's",
        "energy a step",
        "share of the roofline",
        "time",
    ]
    metrics += ["saved for backward", "rate", "relative error", "bandwidth", "share of copy bandwidth"]
    metrics += [f"{kind}, {way}" for kind in ("time", "speedup") for way in WAYS]
    metrics += ["most tokens a step", "step time at 3 sequences"]
    metrics += ["speedup over unfused", "speedup over bf16", "pairs' kernels left"]
    for tables in (TABLES["serve"], TABLES["rl"]):
        metrics += [column.metric for columns in tables for column in columns if column.metric not in metrics]
    for index, case in enumerate(cases.get(name, ["bf16, compiled", "octavo rowwise"])):
        for place, metric in enumerate(metrics):
            record.add(case, metric, "u", 100.0 * (index + 1) + place + 0.25, peer="p", peer_value=7.5)
    return record.save(folder, commit="abc")


def test_the_page_equals_the_records() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text, RECORDS) == text, "run `octavo bench plot`: a record changed and the page did not"
    for name in marked_sections(text):
        plot = PAGE.parent / PLOT_FOLDER / f"{name}.svg"
        assert plot.is_file() == (RECORDS / f"{name}.json").is_file(), f"run `octavo bench plot`: {plot}"


def test_every_benchmark_has_a_section_a_table_and_a_plot() -> None:
    assert marked_sections(PAGE.read_text(encoding="utf-8")) == [*BENCHMARKS]
    assert set(TABLES) == set(PLOTS) == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_figure_of_a_table_is_the_records(name: str, tmp_path: Path) -> None:
    figures = Figures.load(make_record(name, tmp_path))
    values = [row[field] for row in figures.document["rows"] for field in ("value", "peer_value")]
    known = {format(value, form) for value in values for form in (",.0f", ".1f", ".2f", ".1e")}
    shown = re.findall(r"(?<=\| )[0-9][0-9.,e+]*(?= \|)", _table(name, figures))
    assert shown
    assert set(shown) <= known


@pytest.mark.parametrize("name", ["linear", "serve"])
def test_plots_are_written_and_do_not_change(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make_record(name, tmp_path)
    page = tmp_path / "performance.md"
    page.write_text(TEMPLATE.format(name=name))
    assert update_page(tmp_path, page) == [tmp_path / PLOT_FOLDER / f"{name}.svg", page]
    text, plot = page.read_text(), (tmp_path / PLOT_FOLDER / f"{name}.svg").read_bytes()
    assert "What was measured." in text
    assert f"({PLOT_FOLDER}/{name}.svg)" in text
    update_page(tmp_path, page)
    assert (page.read_text(), (tmp_path / PLOT_FOLDER / f"{name}.svg").read_bytes()) == (text, plot)


def test_without_a_record_a_section_is_empty(tmp_path: Path) -> None:
    text = TEMPLATE.format(name="step")
    assert fill(text, tmp_path) == text
    make_record("step", tmp_path)
    assert fill(fill(text, tmp_path), tmp_path / "none") == text


def test_bad_pages_and_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="marks a section 'speed'"):
        fill(TEMPLATE.format(name="speed"), tmp_path)
    with pytest.raises(ConfigError, match="needs a page"):
        update_page(tmp_path, tmp_path / "none.md")
    (tmp_path / "step.json").write_text("{}")
    with pytest.raises(DataError, match=r"step\.json is no benchmark record"):
        Figures.load(tmp_path / "step.json")


def test_the_command_plots_and_names_what_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "performance.md").write_text(TEMPLATE.format(name="step"))
    make_record("step", tmp_path)
    for arguments in (["plot", str(tmp_path), "--out", str(tmp_path)], ["speed"]):
        monkeypatch.setattr(sys, "argv", ["octavo", "bench", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert exit_.value.code == 2
    out = capsys.readouterr()
    assert "step.svg" in out.out
    assert "unknown benchmark 'speed'; known: gemm" in out.err
