"""Checkpoints of the loop: four steps in one go are, bit for bit, two, a resume, and two more."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.models import load_model
from octavo.models.export import ModelExport
from octavo.rl import checkpoint, loop
from octavo.rl.checkpoint import CHECKPOINTS, FinishedRunError
from octavo.rl.config import RLConfig
from octavo.rl.history import StepRow
from octavo.rl.learner import Learner
from octavo.rl.policy import build_reference
from octavo.rl.warmup import WarmupStep
from octavo.run.checkpoint_store import CheckpointStore
from octavo.run.optimizer import MasterAdamW
from tests.rl.conftest import tiny_config
from tests.rl.test_loop import EASY, run, weights_of

Whole = Callable[[str], tuple[Path, loop.RLResult]]
# what clocks say differs between any two runs; an engine counts from its own start
_CLOCKS = ("timing_s/", "perf/", "energy", "power", "joules", "engine/")

INEXACT: dict[str, Any] = {"exact": False, "correction": {"kind": "token_tis"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"trainer": {"minibatches": 2, "lr_warmup_steps": 6}, "algorithm": {"kl_coef": 0.1}},
    "engine-scales": {"rollout": {"kv_scales": "engine"}},
    "trainer-scales": INEXACT | {"rollout": {"kv_scales": "trainer"}},
    "delayed-trainer": INEXACT | {"trainer": {"recipe": "delayed"}, "rollout": {"recipe": "blockwise"}},
}


def variant(directory: Path, name: str, steps: int, **run_keys: Any) -> RLConfig:
    torch.manual_seed(0)  # a checkpoint holds torch's own generator too
    sections = dict(VARIANTS[name])
    trainer = {**sections.pop("trainer", {}), "steps": steps}
    keys = {"checkpoint_every": 2, **run_keys}
    return tiny_config(directory, **sections, trainer=trainer, run=keys, eval={"every": 2})


def bits(result: loop.RLResult) -> list[dict[str, float]]:
    return [{k: v for k, v in row.metrics.items() if not k.startswith(_CLOCKS)} for row in result.history]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_is_whole(result: loop.RLResult, directory: Path, whole: tuple[Path, loop.RLResult]) -> None:
    """Metrics, held-out rewards, weights and the last checkpoint's tensors are those of the run in one go, in bits."""
    assert bits(result) == bits(whole[1])
    assert result.heldout_reward_before == whole[1].heldout_reward_before
    assert result.heldout_reward_after == whole[1].heldout_reward_after
    expected = weights_of(whole[1].model)
    assert all(same(expected[key], value) for key, value in weights_of(result.model).items())
    states = [CheckpointStore(path / CHECKPOINTS).find_latest() for path in (whole[0], directory)]
    assert states[0] is not None and states[1] is not None and states[0].step == states[1].step == 4
    one, other = states[0].load_state(), states[1].load_state()
    assert one.keys() == other.keys() and [key for key in one if not same(one[key], other[key])] == []


@pytest.mark.parametrize("name", VARIANTS)
def test_two_halves_are_the_whole_bit_for_bit(
    tmp_path: Path, name: str, whole: Whole, capfd: pytest.CaptureFixture[str]
) -> None:
    first = run(variant(tmp_path / "halves", name, 2))
    assert len(first.history) == 2
    rest = variant(tmp_path / "halves", name, 4)
    if name == "exact":  # two mini-batches, by their size
        trainer = rest.trainer.model_copy(update={"minibatches": 4, "mini_batch_size": 2, "gather_once": True})
        rollout = rest.rollout.model_copy(update={"keep_weights": not rest.rollout.keep_weights})
        rest = rest.model_copy(update={"trainer": trainer, "rollout": rollout})
    second = loop.run(rest, task=EASY)  # with progress: notes are said there
    assert "other bits" not in capfd.readouterr().err
    assert [row.step for row in second.history] == [1, 2, 3, 4]
    assert second.last_rollouts.sequences == whole(name)[1].last_rollouts.sequences
    assert same(second.last_rollouts.rollout_logprobs, whole(name)[1].last_rollouts.rollout_logprobs)
    assert_is_whole(second, tmp_path / "halves", whole(name))


def test_a_checkpoint_can_be_served_and_metrics_go_on(tmp_path: Path) -> None:
    result = run(variant(tmp_path, "exact", 2))
    (path,) = (tmp_path / CHECKPOINTS).glob("step-*")
    served = load_model(path / "model")
    expected = weights_of(result.model)
    assert all(same(expected[key], value) for key, value in weights_of(served).items())
    run(variant(tmp_path, "exact", 3))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_kill_while_writing_leaves_the_older_checkpoint(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(variant(tmp_path / "killed", "exact", 2))
    write = ModelExport.write

    def die(self: ModelExport, *args: Any) -> None:
        write(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelExport, "write", die)
        with pytest.raises(KeyboardInterrupt):
            run(variant(tmp_path / "killed", "exact", 4))
    found = CheckpointStore(tmp_path / "killed" / CHECKPOINTS).find_latest()
    assert found is not None and found.step == 2
    again = run(variant(tmp_path / "killed", "exact", 4))
    assert bits(again) == bits(whole("exact")[1])


def test_no_resume_starts_over_and_keeps_the_old_run(tmp_path: Path) -> None:
    first = run(variant(tmp_path, "exact", 2))
    again = run(variant(tmp_path, "exact", 2), resume=False)
    assert bits(again) == bits(first)
    assert (tmp_path / "previous-1" / CHECKPOINTS / "LATEST").exists()
    assert (tmp_path / CHECKPOINTS / "LATEST").exists()


def test_what_cannot_go_on_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(variant(tmp_path, "exact", 2))
    with pytest.raises(FinishedRunError, match=r"already at step 2 of 2, nothing was trained; raise trainer\.steps"):
        run(variant(tmp_path, "exact", 2))
    with pytest.raises(ConfigError, match=r"step-00000002 is at step 2, .* step 1; raise trainer\.steps, or start"):
        run(variant(tmp_path, "exact", 1))
    with pytest.raises(CheckpointError, match=r"its numerics is another: trainer\.recipe\.name was .*, is 'bf16'"):
        run(variant(tmp_path, "exact", 3).model_copy(update={"precision": "bf16"}))
    changed = variant(tmp_path, "exact", 3)
    changed = changed.model_copy(update={"algorithm": changed.algorithm.model_copy(update={"clip_low": 0.1})})
    loop.run(changed, task=EASY)
    assert "note: algorithm.clip_low was 0.2, is 0.1: other bits from here on" in capfd.readouterr().err


def test_a_checkpoint_with_former_names_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As an older octavo wrote it; its rows in metrics.jsonl too. No key is said to have changed."""
    config = variant(tmp_path, "exact", 2)
    before = run(config)
    store = checkpoint.open_store(config)
    found = store.find_latest()
    assert found is not None
    former = {"heldout_reward_before": "accuracy_before", "heldout_reward": "accuracy"}
    description = {former.get(key, key): value for key, value in found.description.items()}
    warmup = description["config"]["warmup"]
    warmup["target_accuracy"] = warmup.pop("target_reward")
    older = dataclasses.replace(found, description=description)
    parts = checkpoint.Parts(before.model, *fresh(before, config))
    progress, notes = checkpoint.load(older, config, parts)
    assert progress.heldout_reward_before == before.heldout_reward_before
    assert progress.heldout_reward == before.heldout_reward_after
    assert not notes


def test_a_checkpoint_from_before_update_every_goes_on(tmp_path: Path) -> None:
    """As an older octavo wrote it, whose delayed scaling knew "forward" alone; another difference is still refused."""
    config = variant(tmp_path, "delayed-trainer", 2)
    before = run(config)
    found = checkpoint.open_store(config).find_latest()
    assert found is not None
    delayed = found.description["numerics"]["trainer"]["recipe"]["delayed"]
    assert delayed.pop("update_every") == "step"
    parts = checkpoint.Parts(before.model, *fresh(before, config))
    progress, notes = checkpoint.load(found, config, parts)
    assert progress.step == 2
    assert len(notes) == 1 and "trainer: delayed scaling changed its scales at each forward" in notes[0]
    assert "update_every" not in delayed  # what was read stays as it is
    delayed["margin"] = 1
    with pytest.raises(CheckpointError, match=r"another: trainer\.recipe\.delayed\.margin was 1, is 0; give"):
        checkpoint.load(found, config, parts)


def fresh(result: loop.RLResult, config: RLConfig) -> tuple[MasterAdamW, Any, Any]:
    """An optimizer, tokenizer and reference for a run's model."""
    learner = Learner(result.model, config, build_reference(config, result.model))
    return learner.optimizer, result.tokenizer, learner.reference


def test_former_names_of_the_held_out_reward(tmp_path: Path) -> None:
    fields = {"step": 1, "loss": 0.0, "lr": 0.0, "grad_norm": 0.0, "tokens_per_s": 1.0, "seconds": 1.0}
    row = StepRow.from_dict(fields | {"eval/accuracy": 0.5})
    assert row.metrics == {"eval/reward": 0.5}
    result = run(variant(tmp_path, "exact", 1))
    with pytest.warns(DeprecationWarning, match=r"RLResult\.accuracy_after leaves octavo .* use heldout_reward_after"):
        assert result.accuracy_after == result.heldout_reward_after
    with pytest.warns(DeprecationWarning, match=r"use heldout_reward_before"):
        assert result.accuracy_before == result.heldout_reward_before
    with pytest.warns(DeprecationWarning, match=r"WarmupStep\.accuracy leaves octavo"):
        assert WarmupStep(1, 0.0, 0.5).accuracy == 0.5
