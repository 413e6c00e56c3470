"""The `octavo` command: its table of subcommands, and one red line instead of a traceback."""

import contextlib
import errno
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from octavo import __main__, __version__, cli
from octavo.errors import ConfigError
from tests.assertions import assert_raises
from tests.train.test_full_disk import files_of_at_most

# A command of two words is in a file of both, joined by an underscore; a file without one holds what commands share.
CLI_FILES = {
    path.stem.replace("_", " ")
    for path in Path(cli.__file__).parent.glob("*.py")
    if "\ndef command(" in path.read_text(encoding="utf-8")
}


def octavo(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own."""
    code = "from octavo.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def test_ctrl_c_while_python_imports_is_a_plain_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    module = ModuleType("octavo.cli")
    vars(module)["__getattr__"] = interrupted
    monkeypatch.setitem(sys.modules, "octavo.cli", module)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130


@pytest.fixture
def broken_command(monkeypatch: pytest.MonkeyPatch) -> str:
    def command(path: str) -> None:
        """Raise what a user's mistake raises."""
        raise ConfigError(f"{path}: unknown key [stpes]; did you mean steps?")

    module = ModuleType("broken")
    vars(module)["command"] = command
    monkeypatch.setitem(sys.modules, "broken", module)
    monkeypatch.setitem(cli.COMMANDS, "train", cli.Entry("broken:command", "Break."))
    return "train"


def test_commands_are_frozen() -> None:
    assert set(cli.COMMANDS) == {
        *("train", "generate", "serve", "rl", "inspect", "quantize", "eval", "demo", "analyze", "doctor", "bench"),
        *("doctor mismatch", "upload", "warm"),
    }
    assert set(cli.COMMANDS) >= CLI_FILES


@pytest.mark.parametrize("name", sorted(CLI_FILES & set(cli.COMMANDS)))
def test_existing_command_has_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["octavo", *name.split(), "--help"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert not done.value.code
    assert f"octavo {name}" in capsys.readouterr().out


def test_version_and_help() -> None:
    assert octavo("--version").stdout.strip() == f"octavo {__version__}"
    listing = octavo("--help").stdout
    assert all(name in listing for name in cli.COMMANDS)


def test_unknown_command_names_the_nearest() -> None:
    done = octavo("trainx")
    assert done.returncode == 2
    assert "Did you mean 'train'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["bench", "gemms"], "did you mean 'gemm'?"),
        (["train", "configs/train_tyni.toml"], "no such config file; did you mean configs/train_tiny.toml?"),
        (["rl", "actor_rollout_ref.rollout.n=16"], "keys go with --config-format verl or nemo-rl"),
        (["generate", "config", "-p", "a"], "config: no such checkpoint; did you mean 'configs'?"),
        (["generate", "tests/serve/http/xyz", "-p", "a"], "tests/serve/http/xyz: no such checkpoint\n"),
        (["train", "configs/lora_tiny.toml", "--set", "model.path=runs/none"], "'runs/none': no such directory"),
        (["rl", "configs/rl_arithmetic.toml", "--set", "task.name=arithmetik"], "did you mean 'arithmetic'?"),
        (["rl", "configs/rl_arithmetic.toml", "--set", "algorithm.name=gpro"], "did you mean 'grpo'?"),
        (["rl", "configs/rl_arithmetic.toml", "--set", "trainer.recipe=rowise"], "did you mean 'rowwise'?"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_an_unknown_name_is_answered_with_the_nearest(arguments, hint, monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert hint in capfd.readouterr().err


@pytest.mark.parametrize(("command", "work"), [("train", "octavo.cli.train.train"), ("rl", "octavo.rl.loop.run")])
def test_a_config_that_sets_no_key_is_refused(command, work, tmp_path, monkeypatch, run_octavo):
    file = tmp_path / "empty.toml"
    file.write_text("# nothing yet\n")
    seeds = []

    def refuse(config, **_):
        seeds.append(config.run.seed)
        raise ConfigError("started")

    monkeypatch.setattr(work, refuse)
    ended = run_octavo(command, file)
    assert ended.code == 2 and not seeds
    assert "empty.toml sets no key" in ended.err and f"start from configs/{command}_" in ended.err
    assert "started" in run_octavo(command, file, "--set", "run.seed=3").err and seeds == [3]


def test_the_former_folder_of_configs_is_one_line(monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(sys, "argv", ["octavo", "rl", "recipes/rl_arithmetic.toml", "--show-config"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capfd.readouterr()
    assert not exit_.value.code and "[task]" in out
    former = "recipes/rl_arithmetic.toml leaves octavo with the next release; use configs/rl_arithmetic.toml"
    assert err == f"warning: {former}\n"


@pytest.mark.parametrize("trouble", ["a file stands where a folder is wanted", "Read-only", "File too large"])
@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (["train", "configs/train_tiny.toml"], "octavo.train.loop.load_dataset"),
        (["rl", "configs/rl_arithmetic.toml"], "octavo.rl.loop.build_policy"),
    ],
    ids=["train", "rl"],
)
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    arguments, work, trouble, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    monkeypatch.chdir(Path(__file__).parents[1])
    if trouble == "Read-only":  # which root would not notice by the folder's mode
        refuse = OSError(errno.EROFS, "Read-only file system")
        monkeypatch.setattr("octavo.models.checkpoint.storage.tempfile.mkstemp", Mock(side_effect=refuse))
    elif trouble != "File too large":
        folder = tmp_path / "a-file" / "run"
        folder.parent.touch()
    monkeypatch.setattr(work, lambda *_, **__: pytest.fail("work was begun"))
    monkeypatch.setattr(sys, "argv", ["octavo", *arguments, "--set", f"run.dir={folder}"])
    limit = files_of_at_most(0) if trouble == "File too large" else contextlib.nullcontext()
    with limit, pytest.raises(SystemExit) as exit_:
        cli.main()
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"error: run.dir = {folder} cannot be written: ") and trouble in said
    assert not folder.exists()


def test_octavo_error_is_one_line_and_exit_code_2(broken_command, monkeypatch, capfd):
    path = "a/very/long/path/" * 10
    monkeypatch.setattr(sys, "argv", ["octavo", broken_command, path])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert capfd.readouterr().err == f"error: {path}: unknown key [stpes]; did you mean steps?\n"


def fail_with(error: Exception, command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    def raise_it(path: str) -> None:
        raise error

    vars(sys.modules["broken"])["command"] = raise_it
    monkeypatch.setattr(sys, "argv", ["octavo", command, "x"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_a_note_on_an_error_is_a_line_of_its_own(broken_command, monkeypatch, capfd):
    error = ConfigError("step 3: no answer")
    error.add_note("saved after step 2: run/checkpoints/step-00000002")
    assert fail_with(error, broken_command, monkeypatch) == 2
    assert capfd.readouterr().err == "error: step 3: no answer\nsaved after step 2: run/checkpoints/step-00000002\n"


def test_what_a_disk_refuses_is_one_line_and_a_bug_is_a_traceback(broken_command, monkeypatch, capfd):
    assert fail_with(PermissionError(errno.EACCES, "Permission denied", "/run"), broken_command, monkeypatch) == 2
    assert capfd.readouterr().err == "error: /run: Permission denied; choose another path, or change its permissions\n"
    assert fail_with(OSError(errno.ENOSPC, "No space left", "/run"), broken_command, monkeypatch) == 2
    assert capfd.readouterr().err == "error: /run: No space left; choose another path, or free some space\n"
    for full in (errno.ENOSPC, errno.EFBIG):  # what a write to an open file gets names none
        assert fail_with(OSError(full, "Full"), broken_command, monkeypatch) == 2
        said = "error: a file or the standard output: Full; choose another path, or free some space\n"
        assert capfd.readouterr().err == said
    for bug in (OSError(errno.EBADF, "Bad file descriptor", "/run"), OSError("of ours"), ValueError("of ours")):
        assert_raises(type(bug), r"of ours|Bad file", fail_with, bug, broken_command, monkeypatch)


def test_options_of_a_card_that_is_not_written_are_refused(tmp_path, run_octavo):
    for options in (["--eval", "scores.json"], ["--base-model", "me/small"], ["--license", "mit"]):
        ended = run_octavo("upload", tmp_path, "me/small", "--no-card", *options)
        assert ended.code == 2 and "--no-card writes none; leave them out" in ended.err


def test_a_warning_of_octavos_is_one_line_and_others_are_as_python_has_them(
    broken_command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def warn(path: str) -> None:
        for _ in range(2):
            warnings.warn("x leaves octavo with the next release; use y", DeprecationWarning, stacklevel=1)
        warnings.warn("a neighbour's", UserWarning, stacklevel=1)
        warnings.warn_explicit("codes are dropped", UserWarning, cli.__file__, 1)

    vars(sys.modules["broken"])["command"] = warn
    monkeypatch.setattr(sys, "argv", ["octavo", broken_command, "x"])
    with pytest.warns(UserWarning, match="a neighbour's"), pytest.raises(SystemExit):
        cli.main()
    said = ["warning: x leaves octavo with the next release; use y", "warning: codes are dropped"]
    assert capfd.readouterr().err.splitlines() == said


def test_lazy_command_keeps_its_own_help(broken_command: str) -> None:
    assert "Raise what a user's mistake raises." in (cli.load_command(broken_command).help or "")


def test_help_cuts_no_name_and_no_summary_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for words, wanted in (
        (["serve", "--help"], ["--served-model-name", "--enable-prefix-caching / --no-enable-prefix-caching"]),
        (["--help"], [entry.summary for entry in cli.COMMANDS.values()]),
    ):
        monkeypatch.setattr(sys, "argv", ["octavo", *words])
        assert_raises(SystemExit, None, cli.main)
        said = " ".join(capsys.readouterr().out.split())
        assert [text for text in wanted if text not in said] == []
