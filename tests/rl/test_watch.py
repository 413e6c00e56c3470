"""What a run leaves for people never ends it: each writer fails in step 2, is counted, and goes on in step 3."""

import errno
import io
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import DataError
from octavo.rl.history import CONFIG_FILE, HEALTH_FILE, StepRow, append_lines, read_alerts, read_lines
from octavo.rl.report import REPORT_FILE
from octavo.rl.transcripts import TRANSCRIPTS_FILE, read_transcripts
from octavo.run.metrics import METRICS_FILE, read_metrics
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import run
from tests.rl.test_report import FakeRun

ERRORS = {
    "OSError": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "ValueError": ValueError("I/O operation on closed file"),
    "DataError": DataError("token id 289 is outside the vocabulary of 270"),
}
# who fails -> what it writes
WRITERS = {
    "octavo.rl.reporter.choose_transcripts": TRANSCRIPTS_FILE,
    "octavo.rl.reporter.append_transcripts": TRANSCRIPTS_FILE,
    "octavo.rl.reporter.append_lines": HEALTH_FILE,
    "octavo.rl.progress.RLProgress.show_step": "progress",
    "torch.utils.tensorboard.SummaryWriter.add_scalar": "TensorBoard's events",
    "tests.rl.test_report.FakeRun.log": "W&B's log",
}


@pytest.fixture(autouse=True)
def wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: FakeRun()))


def watched(directory: Path, policy: Policy, **kwargs: Any) -> list[StepRow]:
    """Three steps, each with a transcript, a passed limit, events and a line in W&B."""
    config = tiny_config(
        directory,
        health={"ess": {"low": 2.0, "action": "warn"}},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 4},
        trainer={"steps": 3, "minibatches": 1},
        run={"tensorboard": True, "transcripts_every": 1, "wandb": "mine"},
    )
    history = run(config, model=policy[0], tokenizer=policy[1], **kwargs).history
    assert [row.step for row in history] == [1, 2, 3]
    return history


def assert_said(caplog: pytest.LogCaptureFixture, what: str, error: str, count: int = 1) -> None:
    """Once when it happens, and once at the end of the run with how often."""
    assert caplog.text.count(f"{what} was not written, the run goes on: {error}: ") == 1
    assert f"writes that failed in this run: {what} {count}" in caplog.text


@pytest.mark.parametrize(
    "writer",
    # in CI a file, a screen and a library's writer
    [pytest.param(w, marks=[pytest.mark.largest] if i in (0, 1, 5) else []) for i, w in enumerate(WRITERS)],
)
def test_a_writer_that_fails_ends_no_run(
    tmp_path: Path, policy: Policy, caplog: pytest.LogCaptureFixture, writer: str
) -> None:
    """In step 2 by each kind of error in turn, and not in step 3."""
    for name, error in ERRORS.items():
        directory = tmp_path / name
        caplog.clear()

        def fail(*args: Any, error: Exception = error, **kwargs: Any) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:

            def break_step_2(row: StepRow, patch: Any = patch, fail: Any = fail) -> None:
                patch.undo()
                if row.step == 1:
                    patch.setattr(writer, fail)

            history = watched(directory, policy, on_step=break_step_2)
        # progress is shown after the row is written
        assert [row.metrics.get("run/failed_writes", 0.0) for row in history] == [0.0, 0.0, 1.0]
        assert_said(caplog, WRITERS[writer], name)
        assert read_metrics(directory / METRICS_FILE, StepRow) == history
        missing = {2} if WRITERS[writer] == TRANSCRIPTS_FILE else set()
        assert {t.step for t in read_transcripts(directory / TRANSCRIPTS_FILE)} == {1, 2, 3} - missing
        missing = {2} if WRITERS[writer] == HEALTH_FILE else set()
        assert {f["step"] for f in read_alerts(directory / HEALTH_FILE)} == {1, 2, 3} - missing
        assert (directory / REPORT_FILE).is_file()


def test_wandb_that_does_not_begin_ends_no_run(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**_: Any) -> FakeRun:
        raise ConnectionError("no route to api.wandb.ai")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    history = watched(tmp_path, policy)
    assert_said(caplog, "W&B's log", "ConnectionError")
    assert read_metrics(tmp_path / METRICS_FILE, StepRow) == history and (tmp_path / REPORT_FILE).is_file()


def test_metrics_that_were_cut_short_are_whole_at_the_end(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [0]

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:100] if steps[-1] == 1 else data)

    monkeypatch.setattr("octavo.run.metrics.io.FileIO", File)
    history = watched(tmp_path, policy, on_step=lambda row: steps.append(row.step))
    assert history[2]["run/failed_writes"] == 1.0
    assert_said(caplog, METRICS_FILE, "OSError")
    assert read_metrics(tmp_path / METRICS_FILE, StepRow) == history


def test_folders_in_the_way_of_every_file(tmp_path: Path, policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    """What no test can patch away: real errors of a real disk, from step 2 to the end."""

    def block(row: StepRow) -> None:
        for name in (HEALTH_FILE, TRANSCRIPTS_FILE, REPORT_FILE) if row.step == 1 else ():
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).mkdir()

    history = watched(tmp_path, policy, on_step=block)
    assert [row.metrics.get("run/failed_writes") for row in history] == [None, None, 2.0]
    counts = f"{HEALTH_FILE} 2, {TRANSCRIPTS_FILE} 2, {REPORT_FILE} 1"
    assert f"writes that failed in this run: {counts}" in caplog.text
    assert read_metrics(tmp_path / METRICS_FILE, StepRow) == history


def test_a_report_that_fails_hides_no_error(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("mine" if isinstance(args[0], StepRow) else "the report's")

    monkeypatch.setattr("octavo.rl.reporter.write_report", fail)
    with pytest.raises(RuntimeError, match="mine"):
        watched(tmp_path, policy, on_step=fail)
    assert_said(caplog, REPORT_FILE, "RuntimeError")


def test_a_config_that_cannot_be_written(tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def fail(self: Path, *args: Any, **kwargs: Any) -> int:
        if self.name == CONFIG_FILE:
            raise ERRORS["OSError"]
        return write_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fail)
    assert [row["run/failed_writes"] for row in watched(tmp_path, policy)] == [1.0] * 3


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"step": 1}, {"step": 2}])
    path.write_bytes(path.read_bytes()[:-4])
    append_lines(path, [{"step": 3}])
    append_lines(path, [{"step": 4}])
    assert list(read_lines(path)) == [{"step": 1}, {"step": 3}, {"step": 4}]
    assert path.read_text().count("\n") == 4
