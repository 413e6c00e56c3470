"""Faults of the loop that must be caught, each by name: rewards, groups, layers, routers, KV scales."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import DataError, RecipeError, StaleScaleError
from octavo.models import Decoder
from octavo.nn import Linear, SparseMoE
from octavo.numerics import get_recipe
from octavo.rl import loop, rollout_worker
from octavo.rl.learner import Learner
from octavo.rl.loop import build_policy
from octavo.rl.rollout_batch import Rollouts
from octavo.weights.kv_scales.keeper import KVScaleKeeper
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import EASY, EasyTask, run, weights_of


class RaisingTask(EasyTask):
    def score(self, prompt: str, completion: str) -> float:
        raise KeyError("answer")


class NanTask(EasyTask):
    def score(self, prompt: str, completion: str) -> float:
        return math.nan


@pytest.mark.parametrize(("task", "what"), [(RaisingTask, "raised KeyError: 'answer'; fix"), (NanTask, "gave .* nan")])
def test_a_bad_verifier_is_named_with_its_prompt(
    tmp_path: Path, policy: Policy, task: type[EasyTask], what: str
) -> None:
    with pytest.raises(DataError, match=rf"task 'arithmetic', .*prompt '\d\+\d=', completion .*: {what}"):
        run(tiny_config(tmp_path), model=policy[0], tokenizer=policy[1], task=task(num_digits=1))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_rewards_that_are_no_numbers(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, reward: float
) -> None:
    """However they got past the verifier's own check: nothing is updated from them."""
    model, tokenizer = policy
    generate = rollout_worker.generate_rollouts

    def spoil(*args: Any, **kwargs: Any) -> Rollouts:
        rollouts = generate(*args, **kwargs)
        rollouts.rewards[5] = reward
        return rollouts

    monkeypatch.setattr(rollout_worker, "generate_rollouts", spoil)
    before = weights_of(model)
    with pytest.raises(DataError, match=rf"step 1, sequence 5 \(prompt '.*'\): the reward is {reward}"):
        run(tiny_config(tmp_path), model=model, tokenizer=tokenizer)
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())


class ConstantTask(EasyTask):
    def score(self, prompt: str, completion: str) -> float:
        return 0.1  # whose mean rounds


def test_groups_whose_rewards_are_all_equal(tmp_path: Path, policy: Policy, capfd: pytest.CaptureFixture[str]) -> None:
    task = ConstantTask(num_digits=1, heldout_share=0.3)
    before = weights_of(policy[0])
    result = loop.run(tiny_config(tmp_path), model=policy[0], tokenizer=policy[1], task=task)
    assert [row["reward/equal_groups_share"] for row in result.history] == [1.0] * 3
    assert [row["actor/grad_norm"] for row in result.history] == [0.0] * 3
    assert all(torch.equal(before[name], param) for name, param in policy[0].named_parameters())
    said = capfd.readouterr().err
    assert "step 1: the rewards of each of the 4 groups are all equal, so nothing can be learned" in said
    assert said.count("all equal") == 1  # said once, not at every step
    mixed = loop.run(tiny_config(tmp_path / "mixed"), model=policy[0], tokenizer=policy[1], task=EASY)
    assert all(row["reward/equal_groups_share"] < 1.0 for row in mixed.history)
    shaped = tiny_config(tmp_path / "shaped", algorithm={"overlong_buffer": 4}, rollout={"max_tokens": 4})
    lengths = loop.run(shaped, model=policy[0], tokenizer=policy[1], task=task)  # which are all that can be learned
    learned = [row["actor/grad_norm"] > 0.0 for row in lengths.history]
    assert [row["reward/equal_groups_share"] < 1.0 for row in lengths.history] == learned and any(learned)


def after_first_update(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Let something happen to the policy when step 1 has learned."""
    learn = Learner.learn

    def learn_and_spoil(self: Learner, *args: Any) -> Any:
        update = learn(self, *args)
        spoil(self.model)
        return update

    monkeypatch.setattr(Learner, "learn", learn_and_spoil)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
def test_a_layer_that_leaves_fp8_under_way(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    def skip(model: Decoder) -> None:
        model.layers[0].self_attn.o_proj.recipe = None

    after_first_update(monkeypatch, skip)
    sections = {} if exact else {"correction": {"kind": "token_tis"}}
    with pytest.raises(RecipeError, match=r"layers\.0\.self_attn\.o_proj do not run in it: skipped layers"):
        run(tiny_config(tmp_path, exact=exact, **sections), model=policy[0], tokenizer=policy[1])


def test_a_router_that_is_quantized_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(model: Decoder) -> None:
        block = model.layers[0].mlp
        assert isinstance(block, SparseMoE)
        gate = Linear(32, 4)
        gate.recipe = get_recipe("blockwise")
        block.gate = gate  # type: ignore[assignment]

    after_first_update(monkeypatch, quantize)
    moe = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = tiny_config(tmp_path, model={**tiny_config(tmp_path).model.model_dump(), **moe})
    model, tokenizer = build_policy(config, EASY)
    with pytest.raises(RecipeError, match=r"router layers\.0\.mlp\.gate is quantized"):
        run(config, model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
def test_kv_scales_that_the_refit_forgot(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    calibrate, calls = KVScaleKeeper.calibrate, []

    def forget(self: KVScaleKeeper, sequences: Any) -> Any:
        calls.append(len(sequences))
        return calibrate(self, sequences) if len(calls) == 1 else lambda: None

    monkeypatch.setattr(KVScaleKeeper, "calibrate", forget)
    sections = {} if exact else {"correction": {"kind": "token_tis"}}
    config = tiny_config(tmp_path, exact=exact, rollout={"kv_scales": "trainer"}, **sections)
    with pytest.raises(StaleScaleError, match=r"layer 0 were made for weight version \d+, .*: a stale KV scale"):
        run(config, model=policy[0], tokenizer=policy[1])
    assert calls == [4, 16]  # the first prompts, then the first step's training batch
