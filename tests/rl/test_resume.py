"""Checkpoints of the loop: four steps in one go are, bit for bit, two, a resume, and two more."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.models import Decoder, load_model
from octavo.rl import checkpoint, loop
from octavo.rl.checkpoint import CHECKPOINTS, FinishedRunError
from octavo.rl.config import RLConfig
from octavo.run.checkpoint_store import CheckpointStore
from tests.rl.conftest import tiny_config
from tests.rl.test_loop import EASY, run, weights_of

Whole = Callable[[str], tuple[Path, loop.RLResult]]
# what clocks say differs between any two runs; an engine counts from its own start
_CLOCKS = ("timing_s/", "perf/", "energy", "power", "joules", "engine/")

ARMS: dict[str, dict[str, Any]] = {
    "exact": {"trainer": {"minibatches": 2, "lr_warmup_steps": 6}, "algorithm": {"kl_coef": 0.1}},
    "engine-scales": {"rollout": {"kv_scales": "engine"}},
    "trainer-scales": {
        "exact": False,
        "rollout": {"kv_scales": "trainer"},
        "correction": {"kind": "token_tis"},
    },
    "delayed-trainer": {
        "exact": False,
        "trainer": {"recipe": "delayed"},
        "rollout": {"recipe": "blockwise"},
        "correction": {"kind": "token_tis"},
    },
}


def arm(directory: Path, name: str, steps: int, **run_keys: Any) -> RLConfig:
    torch.manual_seed(0)  # a checkpoint holds torch's own generator too
    sections = dict(ARMS[name])
    trainer = {**sections.pop("trainer", {}), "steps": steps}
    keys = {"checkpoint_every": 2, **run_keys}
    return tiny_config(directory, **sections, trainer=trainer, run=keys, eval={"every": 2})


def bits(result: loop.RLResult) -> list[dict[str, float]]:
    return [{k: v for k, v in row.metrics.items() if not k.startswith(_CLOCKS)} for row in result.history]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_is_whole(result: loop.RLResult, directory: Path, whole: tuple[Path, loop.RLResult]) -> None:
    """Metrics, accuracies, weights and the last checkpoint's tensors are those of the run in one go, in bits."""
    assert bits(result) == bits(whole[1])
    assert (result.accuracy_before, result.accuracy_after) == (whole[1].accuracy_before, whole[1].accuracy_after)
    expected = weights_of(whole[1].model)
    assert all(same(expected[key], value) for key, value in weights_of(result.model).items())
    states = [CheckpointStore(path / CHECKPOINTS).find_latest() for path in (whole[0], directory)]
    assert states[0] is not None and states[1] is not None and states[0].step == states[1].step == 4
    one, other = states[0].load_state(), states[1].load_state()
    assert one.keys() == other.keys() and [key for key in one if not same(one[key], other[key])] == []


@pytest.mark.parametrize("name", ARMS)
def test_two_halves_are_the_whole_bit_for_bit(
    tmp_path: Path, name: str, whole: Whole, capfd: pytest.CaptureFixture[str]
) -> None:
    first = run(arm(tmp_path / "halves", name, 2))
    assert len(first.history) == 2
    rest = arm(tmp_path / "halves", name, 4)
    if name == "exact":  # two mini-batches, by their size
        trainer = rest.trainer.model_copy(update={"minibatches": 4, "mini_batch_size": 2})
        rest = rest.model_copy(update={"trainer": trainer})
    second = run(rest)
    assert "other bits" not in capfd.readouterr().err
    assert [row.step for row in second.history] == [1, 2, 3, 4]
    assert second.last_rollouts.sequences == whole(name)[1].last_rollouts.sequences
    assert same(second.last_rollouts.rollout_logprobs, whole(name)[1].last_rollouts.rollout_logprobs)
    assert_is_whole(second, tmp_path / "halves", whole(name))


def test_a_checkpoint_can_be_served_and_metrics_go_on(tmp_path: Path) -> None:
    result = run(arm(tmp_path, "exact", 2))
    (path,) = (tmp_path / CHECKPOINTS).glob("step-*")
    served = load_model(path / "model")
    expected = weights_of(result.model)
    assert all(same(expected[key], value) for key, value in weights_of(served).items())
    run(arm(tmp_path, "exact", 3))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_kill_while_writing_leaves_the_older_checkpoint(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(arm(tmp_path / "killed", "exact", 2))
    save = checkpoint.save_model

    def die(model: Decoder, directory: Path, **kwargs: Any) -> None:
        save(model, directory, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_model", die)
        with pytest.raises(KeyboardInterrupt):
            run(arm(tmp_path / "killed", "exact", 4))
    found = CheckpointStore(tmp_path / "killed" / CHECKPOINTS).find_latest()
    assert found is not None and found.step == 2
    again = run(arm(tmp_path / "killed", "exact", 4))
    assert bits(again) == bits(whole("exact")[1])


def test_no_resume_starts_over_and_keeps_the_old_run(tmp_path: Path) -> None:
    first = run(arm(tmp_path, "exact", 2))
    again = run(arm(tmp_path, "exact", 2), resume=False)
    assert bits(again) == bits(first)
    assert (tmp_path / "previous-1" / CHECKPOINTS / "LATEST").exists()
    assert (tmp_path / CHECKPOINTS / "LATEST").exists()


def test_what_cannot_go_on_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(arm(tmp_path, "exact", 2))
    with pytest.raises(FinishedRunError, match=r"already at step 2 of 2, nothing was trained; raise trainer\.steps"):
        run(arm(tmp_path, "exact", 2))
    with pytest.raises(ConfigError, match=r"step-00000002 is at step 2, trainer\.steps is 1; raise it, or start over"):
        run(arm(tmp_path, "exact", 1))
    with pytest.raises(CheckpointError, match=r"its numerics is another: trainer\.recipe\.name was .*, is 'bf16'"):
        run(arm(tmp_path, "exact", 3).model_copy(update={"precision": "bf16"}))
    changed = arm(tmp_path, "exact", 3)
    changed = changed.model_copy(update={"algorithm": changed.algorithm.model_copy(update={"clip_low": 0.1})})
    loop.run(changed, task=EASY)
    assert "note: algorithm.clip_low was 0.2, is 0.1: other bits from here on" in capfd.readouterr().err
