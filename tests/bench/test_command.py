"""`octavo bench` and `octavo demo` find bench/ beside the package or in the working directory, or say how to get it."""

import functools
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import octavo
from bench import command
from bench.options import BenchOptions
from bench.program import Program
from bench.serve_options import ServeOptions
from octavo import cli
from octavo.cli.checkout import find_root, load_command
from octavo.errors import ConfigError, StorageError
from tests.assertions import assert_raises

ROOT = Path(octavo.__file__).parent.parent


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if octavo came from a wheel, called in an empty folder."""
    folder = tmp_path / "site-packages" / "octavo"
    monkeypatch.setattr(octavo, "__file__", str(folder / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_checkout_of_the_package_comes_first_then_the_working_directory(tmp_path, monkeypatch, request) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "command.py").touch()
    monkeypatch.chdir(tmp_path)
    assert find_root("bench") == ROOT
    request.getfixturevalue("installed")
    monkeypatch.chdir(ROOT)
    assert find_root("bench") == ROOT


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("arguments", [["bench", "gemm"], ["demo"]])
def test_without_either_one_line_says_how_to_get_it(arguments, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, f"octavo.cli.{arguments[0]}", raising=False)
    monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"octavo {arguments[0]} needs the folder bench/ of octavo's source repository" in line
    assert "pip install -e ." in line


@pytest.mark.usefixtures("installed")
def test_a_folder_of_that_name_that_is_not_octavos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "command.py").write_text("raise SystemExit('another project ran')")
    assert_raises(ConfigError, "needs the folder bench/", find_root, "bench")


@pytest.mark.parametrize(("former", "today"), [("--cases", "--filter"), ("--arm", "--variant")])
def test_a_former_name_of_an_option_is_taken_with_a_warning(former, today, monkeypatch):
    found: list[BenchOptions] = []
    monkeypatch.setattr(command, "run_benchmark", lambda _, options: found.append(options) or True)
    said = f"{former} leaves octavo with the next release; use {today}"
    run = functools.partial(CliRunner().invoke, cli.app, catch_exceptions=False)
    run(["bench", "serve", "--device", "cpu", "--quick", today, "a", today, "b"])
    with pytest.warns(DeprecationWarning, match=said):
        run(["bench", "serve", "--device", "cpu", "--quick", today, "a", former, "b"])
    assert found[0] == found[1] and ("a", "b") in (found[0].filters, found[0].serve.variants)
    program = Program("bench.none", None, former={former: today})
    program.add_argument(today, dest="value")
    with pytest.warns(DeprecationWarning, match=said):
        assert program.parse([f"{former}=x"]).value == "x"


def test_it_runs_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if Path(folder).resolve() != ROOT])
    assert load_command("bench", "bench.command") is command.command and sys.path[0] == str(ROOT)


@pytest.mark.parametrize("name", ["out", "write_table"])
def test_what_cannot_be_written_is_refused_before_the_measuring(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" if name == "out" else tmp_path
    said = f"--{name.replace('_', '-')} = {path} cannot be written"
    assert_raises(StorageError, said, functools.partial(BenchOptions, device="cpu", quick=True, **{name: path}))
    with pytest.raises(ConfigError, match=r"--checkpoint must be a checkpoint's folder, and .* has no config\.json"):
        ServeOptions(checkpoint=tmp_path)
