"""A step that fails is answered with a checkpoint of the last whole step, and the same command goes on from it."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import DataError, StorageError
from octavo.rl import checkpoint, trainer
from octavo.rl.checkpoint import CHECKPOINTS
from octavo.rl.config import RLConfig
from octavo.rl.history import StepRow
from octavo.run import checkpoint_store as checkpointing
from octavo.run.metrics import METRICS_FILE, read_metrics
from octavo.run.optimizer import MasterAdamW
from tests.rl.test_loop import EasyTask, run, weights_of
from tests.rl.test_resume import Whole, assert_is_whole, bits, same, variant

GOES_ON = "the same command goes on from there"


class Fault:
    """Something that works up to the end of a step and raises from then on."""

    def __init__(self, after_step: int) -> None:
        self.after_step, self.is_broken = after_step, False

    def on_step(self, row: StepRow) -> None:
        self.is_broken = row.step >= self.after_step

    def check(self) -> None:
        if self.is_broken:
            raise KeyError("answer")


class BrokenVerifier(EasyTask):
    def __init__(self, fault: Fault) -> None:
        super().__init__(num_digits=1, heldout_share=0.3)
        self.fault = fault

    def score(self, prompt: str, completion: str) -> float:
        self.fault.check()
        return super().score(prompt, completion)


def long_config(directory: Path, name: str, **run_keys: Any) -> RLConfig:
    """Four steps whose only checkpoint of their own is the last."""
    return variant(directory, name, 4, **{"checkpoint_every": 100, **run_keys})


def fail_before_the_update(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """When forward and backward have run: histories of amaxes have moved, parameters have not."""
    clip = MasterAdamW.clip_gradients

    def clip_or_raise(self: MasterAdamW, max_norm: float) -> Any:
        fault.check()
        return clip(self, max_norm)

    monkeypatch.setattr(MasterAdamW, "clip_gradients", clip_or_raise)


def run_into(fault: Fault, config: RLConfig, **kwargs: Any) -> list[str]:
    """The notes on what the fault raises."""
    with pytest.raises((KeyError, DataError)) as raised:
        run(config, on_step=fault.on_step, **kwargs)
    assert "answer" in str(raised.value), "the first error is the one that is seen"
    return list(raised.value.__notes__)


def steps_saved(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (directory / CHECKPOINTS).glob("step-*"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("exact", "verifier"), ("exact", "gradients"), ("engine-scales", "verifier"), ("trainer-scales", "gradients"),
        ("delayed-trainer", "gradients"),
    ],
)  # fmt: skip
def test_a_failed_step_costs_that_step_and_no_bit(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    fault, config = Fault(after_step=2), long_config(tmp_path / "failed", name)
    with monkeypatch.context() as patch:
        if place == "gradients":
            fail_before_the_update(patch, fault)
        (note,) = run_into(fault, config, **({"task": BrokenVerifier(fault)} if place == "verifier" else {}))
    assert note == f"saved after step 2: {tmp_path}/failed/{CHECKPOINTS}/step-00000002; {GOES_ON}"
    assert steps_saved(tmp_path / "failed") == [2]
    assert_is_whole(run(config), tmp_path / "failed", whole(name))


def test_a_failed_evaluation_keeps_its_step(tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy, calls = trainer.build_evaluator, []

    def build(*args: Any) -> Any:
        evaluator = accuracy(*args)
        measure = evaluator.mean_reward

        def fail_at_step_2(prompts: list[str]) -> float:
            calls.append(prompts)
            if len(calls) == 2:
                raise RuntimeError("no judge")
            return measure(prompts)

        monkeypatch.setattr(evaluator, "mean_reward", fail_at_step_2)
        return evaluator

    monkeypatch.setattr(trainer, "build_evaluator", build)
    config = long_config(tmp_path / "failed", "exact")
    with pytest.raises(RuntimeError, match="no judge") as raised:
        run(config)
    assert raised.value.__notes__[0].startswith("saved after step 2: ")
    assert [row.step for row in read_metrics(tmp_path / "failed" / METRICS_FILE, StepRow)] == [1, 2]
    again = run(config)
    assert [row.step for row in again.history] == [1, 2, 3, 4]
    expected = weights_of(whole("exact")[1].model)
    assert all(same(expected[key], value) for key, value in weights_of(again.model).items())


def test_a_last_step_that_fails_late_has_nothing_to_go_on_to(tmp_path: Path) -> None:
    def fail_at_the_end(row: StepRow) -> None:
        if row.step == 2:
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late") as raised:
        run(variant(tmp_path, "exact", 2), on_step=fail_at_the_end)
    assert raised.value.__notes__ == [f"saved after step 2, the last: {tmp_path}/{CHECKPOINTS}/step-00000002"]


def test_an_update_that_has_begun_leaves_the_older_checkpoint(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two minibatches the first changed the weights: no step can be saved any more."""
    fault, step_optimizer, num_steps = Fault(after_step=3), MasterAdamW.step, []

    def step_once(self: MasterAdamW, lr: float) -> None:
        if fault.is_broken and num_steps:
            fault.check()
        num_steps.extend([1] if fault.is_broken else [])
        step_optimizer(self, lr=lr)

    config = long_config(tmp_path / "failed", "exact", checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(MasterAdamW, "step", step_once)
        (note,) = run_into(fault, config)
    assert num_steps == [1]
    assert note == f"the last checkpoint is {tmp_path}/failed/{CHECKPOINTS}/step-00000002; {GOES_ON}"
    assert steps_saved(tmp_path / "failed") == [2]
    assert bits(run(config)) == bits(whole("exact")[1])


def test_a_first_step_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(after_step=0)
    fault.is_broken = True
    fail_before_the_update(monkeypatch, fault)
    assert run_into(fault, long_config(tmp_path, "exact")) == ["nothing was saved"]
    assert steps_saved(tmp_path) == []


def test_a_run_without_checkpoints_gets_none(tmp_path: Path) -> None:
    fault = Fault(after_step=2)
    with pytest.raises(DataError) as raised:
        run(long_config(tmp_path, "exact", checkpoint_every=0), task=BrokenVerifier(fault), on_step=fault.on_step)
    assert not getattr(raised.value, "__notes__", [])
    assert steps_saved(tmp_path) == []


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    fault = Fault(after_step=2)
    (note,) = run_into(fault, long_config(tmp_path, "exact", checkpoint_every=2), task=BrokenVerifier(fault))
    assert note.startswith("saved after step 2: ") and steps_saved(tmp_path) == [2]


def test_a_checkpoint_that_fails_too_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StorageError(28, "no space")

    monkeypatch.setattr(checkpoint, "save", refuse)
    fault = Fault(after_step=2)
    (note,) = run_into(fault, long_config(tmp_path, "exact"), task=BrokenVerifier(fault))
    assert note == "a checkpoint of the last step could not be written either: no space"


def test_a_full_disk_is_asked_once_and_the_last_checkpoint_named(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, save_file = [], checkpointing.save_file

    def fill(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path)

    config = long_config(tmp_path, "exact", checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "save_file", fill)
        with pytest.raises(StorageError) as raised:
            run(config)
    (step_2,) = (tmp_path / CHECKPOINTS).glob("step-*")
    assert step_2.name == "step-00000002" and len(calls) == 2
    assert str(raised.value).startswith("checkpoint of step 4: ") and not getattr(raised.value, "__notes__", [])
    assert "No space left on device" in str(raised.value) and str(raised.value).endswith(f"last good one is {step_2}")
    assert bits(run(config)) == bits(whole("exact")[1])


@pytest.mark.parametrize("partial_rollouts", ["continue", "drop"])
def test_asynchronous_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial_rollouts: str) -> None:
    """The sampler is ahead and goes on while the trainer's step fails."""
    sections = {"asynchronous": {"max_policy_lag": 1, "partial_rollouts": partial_rollouts}}
    config = long_config(tmp_path, "trainer-scales").model_dump() | sections
    fault = Fault(after_step=2)
    with monkeypatch.context() as patch:
        fail_before_the_update(patch, fault)
        (note,) = run_into(fault, RLConfig(**config))
    assert note.startswith("saved after step 2: ")
    again = run(RLConfig(**config))
    assert [row.step for row in again.history] == [1, 2, 3, 4]
    assert again.history[2]["actor/grad_norm"] > 0
