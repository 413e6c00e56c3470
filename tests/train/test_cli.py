"""`octavo train` as a person runs it."""

import os
import signal
import sys
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli.train import print_result
from octavo.run.metrics import Row
from octavo.train import TrainConfig, TrainResult, loop, train

from .conftest import written


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Path:
    return written(tmp_path / "config.toml", corpus, run={"steps": 4, "dir": str(tmp_path / "run")})


def octavo_train(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["octavo", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_runs_resumes_and_starts_anew(config, tmp_path, monkeypatch, capsys):
    checkpoints = tmp_path / "run" / "checkpoints"
    assert octavo_train(monkeypatch, config, "--device", "cpu", "--set", "precision.recipe=rowwise") == 0
    said = capsys.readouterr()
    assert "perplexity" in said.out
    assert f"checkpoint {checkpoints / 'step-00000004'}" in said.out
    run = checkpoints.parent
    assert f'octavo generate {run} -p "..."; serve it: octavo serve {run}' in said.out
    assert octavo_train(monkeypatch, config, "--set", "run.steps=6") == 0
    assert "resuming after step 4" in capsys.readouterr().err
    assert (checkpoints / "LATEST").read_text() == "step-00000006\n"
    assert octavo_train(monkeypatch, config, "--no-resume") == 0
    assert (checkpoints / "LATEST").read_text() == "step-00000004\n"
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "LATEST").read_text() == "step-00000006\n"


def test_a_busy_cpu_is_said_before_the_first_step(config, monkeypatch, capsys):
    monkeypatch.setattr(loop, "threads_advice", lambda device: f"set OMP_NUM_THREADS=3 on {device}")
    for is_said in (True, False):  # the second time nothing is left to do
        assert octavo_train(monkeypatch, config, "--device", "cpu") == 0
        assert ("set OMP_NUM_THREADS=3 on cpu, or steps take much longer" in capsys.readouterr().err) == is_said


def test_a_finished_run_says_that_nothing_was_trained(config, monkeypatch, capsys):
    assert octavo_train(monkeypatch, config) == 0
    assert "validation loss" in capsys.readouterr().out
    change = "precision.recipe was 'blockwise', is 'bf16': without effect, for no step is left\n"
    for arguments, is_said in (([], False), (["--set", "precision.recipe=bf16"], True)):
        assert octavo_train(monkeypatch, config, *arguments) == 0
        said = capsys.readouterr()
        assert "already at step 4 of 4, nothing was trained; raise run.steps, or --no-resume" in said.out
        assert "validation loss" not in said.out and "resuming" not in said.err
        assert change in said.err if is_said else not said.err
    assert octavo_train(monkeypatch, config, "--set", "precision.recipe=bf16", "--set", "run.steps=5") == 0
    said = capsys.readouterr()
    assert "the recipe goes from blockwise to bf16" in said.err
    assert "validation loss" in said.out


def test_a_refused_run_writes_no_cache_and_a_run_says_where_it_is(config, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    where = ["--set", f"data.cache_dir={cache}"]
    assert octavo_train(monkeypatch, config, *where, "--plan") == 0
    assert octavo_train(monkeypatch, config, *where, "--set", "model.num_key_value_heads=3") == 2
    assert "must be a multiple of num_kv_heads=3" in capsys.readouterr().err
    assert not cache.exists()
    assert octavo_train(monkeypatch, config, *where) == 0
    assert f"; kept in {cache}\n" in capsys.readouterr().err.replace("\n ", " ")
    assert cache.exists()


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("step", [2, 4])
def test_an_interrupted_run_has_the_signals_exit_code(config, number, code, step, monkeypatch, capsys):
    """One in its last step is complete, and a success."""

    def stop(row: Row) -> None:
        if row.step == step:
            os.kill(os.getpid(), number)

    def interrupted(config: TrainConfig, resume: bool) -> TrainResult:
        return train(config, resume=resume, on_step=stop)

    monkeypatch.setattr("octavo.cli.train.train", interrupted)
    assert octavo_train(monkeypatch, config) == (code if step < 4 else 0)
    said = capsys.readouterr().out
    assert (f"stopped by {number.name} after step 2; the same command goes on" in said) == (step < 4)
    octavo_train(monkeypatch, config, "--no-resume")
    assert ("; the same command without --no-resume goes on" in capsys.readouterr().out) == (step < 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "run.stpes=3"], "error: command line: unknown key run.stpes; did you mean run.steps?"),
        (["--set", "precision.recipe=fp9"], "unknown recipe 'fp9'"),
        (["--set", "data.path=gone.txt"], "error: gone.txt: no such file or directory"),
        (["--device", "toaster"], "run.device must be"),
    ],
)
def test_mistakes_are_one_red_line(config, arguments, message, tmp_path, monkeypatch, capsys):
    assert octavo_train(monkeypatch, config, *arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_text_beyond_the_limit_is_said_to_be_left_out(config, corpus, monkeypatch, capsys):
    num_bytes = corpus.stat().st_size
    for arguments, is_said in ((["data.max_bytes=9000", "data.path=" + str(corpus.parent)], True), ([], False)):
        options = [word for key in ("run.steps=3", *arguments) for word in ("--set", key)]
        assert octavo_train(monkeypatch, config, *options, "--no-resume") == 0
        said = capsys.readouterr().err
        assert ("is not read; raise it, or --set data.max_bytes=0 to read all" in said) == is_said
        assert (f"{corpus.parent} has {num_bytes:,} bytes, and text beyond data.max_bytes = 9,000" in said) == is_said


def test_a_path_that_looks_like_markup_is_printed_as_it_is(tmp_path, capsys):
    checkpoint = tmp_path / "[bold]a:b:" / "checkpoints" / "step-1"
    print_result(TrainResult(1, (), None, None, checkpoint, None, None, None, "SIGTERM"))
    assert str(checkpoint) in capsys.readouterr().out
