"""docs/performance.md says what the records say, and `octavo bench plot` writes it."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from bench import BENCHMARKS
from bench.charts import PLOTS
from bench.figures import Figures
from bench.page import PLOT_FOLDER, _table, fill, marked_sections, update_page
from bench.report import TABLES
from octavo import cli
from octavo.errors import ConfigError, DataError
from tests.assertions import assert_raises

ROOT = Path(__file__).parent.parent.parent
PAGE, RECORDS = ROOT / "docs" / "performance.md", ROOT / "bench" / "records"
TEMPLATE = "# Title\n\n<!-- record {name} -->\n<!-- end -->\n\nrest\n"


def copy_record(name: str, folder: Path) -> None:
    shutil.copy(RECORDS / f"{name}.json", folder)


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
def test_every_figure_of_a_table_is_the_records(name: str) -> None:
    figures = Figures.load(RECORDS / f"{name}.json")
    fields = ("value", "p20", "p80", "peer_value")
    values = [row[field] for row in figures.document["rows"] for field in fields if row[field] is not None]
    known = {format(value, form) for value in values for form in (",.0f", ",.1f", ".2f", ".1e")}
    shown = re.findall(r"(?<=\| )[0-9][0-9.,e+]*(?= \|)", _table(name, figures))
    assert shown and set(shown) <= known


@pytest.mark.parametrize(("name", "error"), [("lineal", ConfigError), ("rl", DataError)], ids=["mark", "record"])
def test_nothing_is_written_where_a_mark_or_record_is_bad(name: str, error: type[Exception], tmp_path: Path) -> None:
    copy_record("linear", tmp_path)
    (tmp_path / f"{name}.json").write_text("{}")
    page = tmp_path / "performance.md"
    page.write_text(TEMPLATE.format(name="linear") + TEMPLATE.format(name=name))
    assert_raises(error, None, update_page, tmp_path, page)
    assert not (tmp_path / PLOT_FOLDER).exists()


@pytest.mark.parametrize("name", ["linear", "rl"])
def test_plots_are_written_and_do_not_change(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    copy_record(name, tmp_path)
    page = tmp_path / "performance.md"
    page.write_text(TEMPLATE.format(name=name))
    assert update_page(tmp_path, page) == [tmp_path / PLOT_FOLDER / f"{name}.svg", page]
    text, plot = page.read_text(), (tmp_path / PLOT_FOLDER / f"{name}.svg").read_bytes()
    assert f"({PLOT_FOLDER}/{name}.svg)" in text
    update_page(tmp_path, page)
    assert (page.read_text(), (tmp_path / PLOT_FOLDER / f"{name}.svg").read_bytes()) == (text, plot)


def test_without_a_record_a_section_is_empty_and_bad_ones_are_named(tmp_path: Path) -> None:
    text = TEMPLATE.format(name="step")
    assert fill(text, tmp_path) == fill(fill(text, RECORDS), tmp_path) == text
    assert_raises(ConfigError, "marks a section 'speed'", fill, TEMPLATE.format(name="speed"), tmp_path)
    assert_raises(ConfigError, "needs a page", update_page, tmp_path, tmp_path / "none.md")
    (tmp_path / "step.json").write_text("{}")
    assert_raises(DataError, r"step\.json is no benchmark record", Figures.load, tmp_path / "step.json")


def test_the_command_plots_and_names_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "performance.md").write_text(TEMPLATE.format(name="step"))
    copy_record("step", tmp_path)
    for arguments in (["plot", str(tmp_path), "--out", str(tmp_path)], ["speed"]):
        monkeypatch.setattr(sys, "argv", ["octavo", "bench", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert exit_.value.code == 2
    out = capsys.readouterr()
    assert "step.svg" in out.out and "unknown benchmark 'speed'; known: gemm" in out.err
