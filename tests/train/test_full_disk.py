"""A disk that is full at a checkpoint: one line, exit code 2, and the last good checkpoint is whole and goes on."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

from octavo.errors import StorageError
from octavo.models import load_model
from octavo.run.checkpoint_store import LATEST, CheckpointStore
from octavo.train import train

from .conftest import MakeConfig, written
from .test_cli import octavo_train

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
IN_WORDS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
# each stage of writing a checkpoint, and how it tells
STAGES: dict[str, Exception] = {
    "octavo.models.export.write_rows": NO_SPACE,
    "octavo.run.checkpoint_store.save_file": IN_WORDS,
    "octavo.models.tokenizer.Tokenizer.save": NO_SPACE,
    "octavo.models.checkpoint.atomic.sync_to_disk": NO_SPACE,
    "octavo.run.atomic.os.replace": NO_SPACE,  # LATEST
}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file of this process grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_command_says_it_in_one_line(corpus, tmp_path, monkeypatch, capsys):
    """Under a limit of the kernel's, which stands for a full disk: every file but the tensors fits."""
    root = tmp_path / "run" / "checkpoints"
    config = written(tmp_path / "config.toml", corpus, run={"steps": 3, "dir": str(tmp_path / "run")})
    assert octavo_train(monkeypatch, config) == 0
    capsys.readouterr()
    with files_of_at_most(30_000):
        assert octavo_train(monkeypatch, config, "--set", "run.steps=5") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    (line,) = errors
    step_4, step_3 = root / "step-00000004", root / "step-00000003"
    assert line.startswith(f"error: checkpoint of step 4: {step_4} cannot be written: File too large")
    assert line.endswith(f"; free some space, or choose a path on another disk; the last good one is {step_3}")
    assert sorted(path.name for path in root.iterdir()) == [LATEST, "step-00000002", "step-00000003"]
    load_model(step_3 / "model")
    assert octavo_train(monkeypatch, config, "--set", "run.steps=5") == 0
    assert "resuming after step 3" in capsys.readouterr().err


def test_a_disk_without_room_for_a_checkpoint_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    monkeypatch.setattr("octavo.models.checkpoint.storage.shutil.disk_usage", lambda _: Mock(free=1000))
    with pytest.raises(
        StorageError, match=r"has 0\.0 MB left, and a checkpoint takes at least 0\.\d MB; free some space"
    ):
        train(config, progress=False)
    assert not config.run.dir.exists()


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_full_at_any_stage_leaves_the_last_checkpoint(make_config: MakeConfig, stage: str) -> None:
    config = make_config(run={"steps": 4})
    store = CheckpointStore(config.run.dir / "checkpoints")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise STAGES[stage]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError) as raised:
        train(config, progress=False, on_step=lambda row: patch.setattr(stage, fail) if row.step == 3 else None)
    assert "checkpoint of step 4: " in str(raised.value) and "No space left on device" in str(raised.value)
    assert str(raised.value).endswith(f"the last good one is {store.path_of(2)}")
    found = store.find_latest()
    assert found is not None and found.step == 2
    load_model(found.path / "model")
    assert not list(store.root.glob(".*")), "nothing half written stays"
    again = train(config, progress=False)
    assert (again.step, again.first_step) == (4, 2)
