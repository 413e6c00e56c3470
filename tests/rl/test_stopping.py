"""A run that a signal stops saves, and goes on with the same bits; before the first step it says that nothing was."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo.cli import app
from octavo.cli.rl import _what_goes_on
from octavo.integrations.config import to_toml
from octavo.rl import loop
from octavo.rl.checkpoint import CHECKPOINTS, FinishedRunError
from octavo.rl.history import StepRow
from octavo.rl.progress import RLProgress
from octavo.run.metrics import METRICS_FILE
from octavo.run.stopping import StoppedBeforeStepError, raise_on_signals, stop_on_signals
from tests import forks
from tests.rl.conftest import tiny_config
from tests.rl.test_loop import EASY, run
from tests.rl.test_resume import bits

pytestmark = pytest.mark.usefixtures("default_signals")
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def send_in(monkeypatch: pytest.MonkeyPatch, method: str, number: signal.Signals, times: int = 1) -> None:
    """Signals come while a method of RLProgress runs."""

    def stop(self: RLProgress, row: Any) -> None:
        for _ in range(times):
            send(number)

    monkeypatch.setattr(RLProgress, method, stop)


def octavo_rl(directory: Path, *arguments: str, **sections: Any) -> Result:
    """`octavo rl` of the tiny config."""
    config = directory / "config.toml"
    config.write_text(to_toml(tiny_config(directory / "run", **sections)), encoding="utf-8")
    return CliRunner().invoke(app, ["rl", str(config), *arguments])


@BOTH
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    whole = run(tiny_config(tmp_path / "whole"))
    assert whole.stopped_by is None and not (tmp_path / "whole" / CHECKPOINTS).exists()

    def stop(row: StepRow) -> None:
        if row.step == 2:
            send(number)

    config = tiny_config(tmp_path / "stopped")
    stopped = run(config, on_step=stop)
    assert stopped.stopped_by == number.name and len(stopped.history) == 2
    assert stopped.checkpoint == config.run.dir / CHECKPOINTS / "step-00000002" / "model"
    assert (stopped.checkpoint / "config.json").is_file()
    assert signal.getsignal(number) is before
    again = run(config)
    assert again.stopped_by is None and bits(again) == bits(whole)
    with pytest.raises(FinishedRunError, match="already at step 3 of 3"):  # not once more from step 2
        run(config)


def test_an_asynchronous_run_saves_too(tmp_path: Path) -> None:
    sections = {"exact": False, "correction": {"kind": "token_tis"}, "asynchronous": {"max_policy_lag": 1}}
    config = tiny_config(tmp_path, **sections)
    stopped = run(config, on_step=lambda _: send(signal.SIGTERM))
    assert stopped.stopped_by == "SIGTERM" and len(stopped.history) == 1
    assert [row.step for row in run(config).history] == [1, 2, 3]


def test_a_signal_in_the_last_step_is_no_stop(tmp_path: Path) -> None:
    result = run(tiny_config(tmp_path, trainer={"steps": 1}), on_step=lambda _: send(signal.SIGINT))
    assert result.stopped_by is None and "eval/reward" in result.history[-1].metrics


@pytest.mark.parametrize(("arguments", "how"), [((), ""), (("--no-resume",), " without --no-resume")])
def test_the_command_says_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], how: str
) -> None:
    send_in(monkeypatch, "show_step", signal.SIGINT)
    result = octavo_rl(tmp_path, *arguments)
    assert result.exit_code == 130  # a job in several steps must not go on with half a run
    assert result.stdout == f"stopped by SIGINT after step 1; the same command{how} goes on\n"


def test_the_summary_of_a_resumed_run_says_what_was_done_now(tmp_path: Path) -> None:
    sections = {"run": {"checkpoint_every": 1}, "trainer": {"steps": 2}}
    first = octavo_rl(tmp_path, **sections)
    assert re.search(r"\b2 steps, \d+ s", first.stdout)
    more = octavo_rl(tmp_path, "--set", "trainer.steps=3", **sections)
    assert re.search(r"\b3 steps, 1 of them now, \d+ s", more.stdout)


def test_a_finished_run_is_no_error(tmp_path: Path) -> None:
    sections = {"run": {"checkpoint_every": 1}, "trainer": {"steps": 1}}
    assert octavo_rl(tmp_path, **sections).exit_code == 0
    said = "already at step 1 of 1, nothing was trained; raise trainer.steps, or --no-resume / another run.dir\n"
    said += f"checkpoint: {tmp_path / 'run' / CHECKPOINTS / 'step-00000001' / 'model'}\n"
    again = octavo_rl(tmp_path, **sections)
    assert (again.exit_code, again.stdout, again.stderr) == (0, said, "")
    changed = octavo_rl(tmp_path, "--set", "algorithm.clip_low=0.1", **sections)
    assert (changed.exit_code, changed.stdout) == (0, said)
    assert changed.stderr == "algorithm.clip_low was 0.2, is 0.1: without effect, for no step is left\n"


def test_a_second_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send_in(monkeypatch, "show_step", signal.SIGINT, times=2)
    result = octavo_rl(tmp_path)
    assert result.exit_code == 130
    assert "stopped at once; nothing was saved" in result.stderr


def test_ranks_but_the_first_do_not_look_for_what_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for it removes leftovers, and they may be what the first rank is about to write."""
    config = tiny_config(tmp_path, run={"checkpoint_every": 3})
    run(config)
    leftover = tmp_path / CHECKPOINTS / ".step-00000004.tmp-0"
    leftover.mkdir()
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert _what_goes_on(config, resume=True) == "" and leftover.exists()
    monkeypatch.setenv("RANK", "0")
    assert _what_goes_on(config, resume=True).startswith("the same command goes on from ") and not leftover.exists()


@BOTH
def test_in_the_warm_start_nothing_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    send_in(monkeypatch, "show_warmup", number)
    result = octavo_rl(tmp_path, warmup={"steps": 2, "check_prompts": 8, "batch_size": 8})
    assert result.exit_code == 128 + number
    assert f"stopped by {number.name} before a step was made: nothing was saved\n" in result.stderr
    assert not (tmp_path / "run" / CHECKPOINTS).exists()
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """A job in the background of a shell script is started so, lest Ctrl-C in the script's terminal end it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    result = run(tiny_config(tmp_path), on_step=lambda _: send(signal.SIGINT))
    assert result.stopped_by is None and len(result.history) == 3
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def run_ignoring() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not slow and not largest"]
    sys.exit(pytest.main([__file__, *options]))


@pytest.mark.largest
def test_these_tests_pass_where_sigint_is_ignored(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        code = forks.Fork(run_ignoring, streams=(log.fileno(), log.fileno())).wait(300)
    assert code == 0, (tmp_path / "log").read_text()[-2000:]


def test_a_handler_of_another_owner_stays() -> None:
    with stop_on_signals() as outer, raise_on_signals():
        send(signal.SIGTERM)
    assert outer.reason == "SIGTERM"
    with pytest.raises(StoppedBeforeStepError), raise_on_signals():
        send(signal.SIGTERM)


def test_a_run_repeated_says_where_the_earlier_one_went(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path, trainer={"steps": 1})
    loop.run(config, task=EASY)
    assert "moved to" not in capfd.readouterr().err
    loop.run(config, task=EASY)
    aside = tmp_path / "previous-1"
    assert (
        f"note: the earlier run in {tmp_path} was moved to {aside}; this one starts from step 1\n"
        in capfd.readouterr().err
    )
    assert (aside / METRICS_FILE).is_file()
