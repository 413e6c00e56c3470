"""The warm start: it learns the answers, stops at its target, and leaves a warm policy alone."""

from pathlib import Path

import pytest
import torch

from octavo.errors import NonFiniteError
from octavo.models import save_model, sequence_logprobs
from octavo.numerics import Numerics, get_recipe
from octavo.rl.config import WarmupSection
from octavo.rl.policy import warm_policy
from octavo.rl.progress import RLProgress
from octavo.rl.tasks import Arithmetic
from octavo.rl.warmup import WarmupStep, warm_up
from octavo.run.optimizer import MasterAdamW
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import run

TASK = Arithmetic(num_digits=1, heldout_share=0.3)


def test_it_learns_and_stops_at_the_target(policy: Policy) -> None:
    accuracies = iter([0.0, 0.1, 0.5, 0.9])
    seen: list[WarmupStep] = []
    steps = warm_up(
        *policy,
        TASK,
        WarmupSection(steps=100, check_every=10, batch_size=32, target_reward=0.5, lr=1e-2),
        seed=0,
        measure=lambda: next(accuracies),
        on_step=seen.append,
    )
    assert steps == seen
    assert [step.reward for step in steps if step.reward is not None] == [0.1, 0.5]
    assert len(steps) == 20
    assert steps[-1].loss < 0.7 * steps[0].loss


def test_its_token_mean_and_the_learning_rate_of_each_step(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of every answer alike; step n of the first twenty takes n / 20 of the learning rate."""
    model, tokenizer = policy
    prompts, answers = (tokenizer.encode_batch(list(x)) for x in zip(*TASK.examples("train", 8, 1), strict=True))
    assert len({len(answer) for answer in answers}) > 1
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    with torch.no_grad():
        expected = -torch.cat(sequence_logprobs(model, sequences, prompt_lens=[len(ids) for ids in prompts])).mean()
    taken: list[float] = []
    monkeypatch.setattr(MasterAdamW, "step", lambda _, lr: taken.append(lr))
    section = WarmupSection(steps=3, check_every=3, batch_size=8, lr=1e-2)
    steps = warm_up(model, tokenizer, TASK, section, seed=0, measure=lambda: 0.0)
    assert steps[0].loss == pytest.approx(expected.item(), rel=1e-5)
    assert taken == pytest.approx([0.0005, 0.001, 0.0015])


def test_a_warm_policy_is_left_alone(policy: Policy) -> None:
    model, tokenizer = policy
    before = {name: param.clone() for name, param in model.named_parameters()}
    assert warm_up(model, tokenizer, TASK, WarmupSection(), seed=0, measure=lambda: 1.0) == []
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())


def test_a_loss_that_is_not_finite_stops_it(policy: Policy) -> None:
    model, tokenizer = policy
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="warm start, step 1: the loss is nan"):
        warm_up(model, tokenizer, TASK, WarmupSection(batch_size=8), seed=0, measure=lambda: 0.0)


def test_an_infinity_that_fp8_hides_stops_it(policy: Policy) -> None:
    model, tokenizer = policy
    model.set_numerics(Numerics(get_recipe("blockwise")))
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[1, 2] = torch.inf
    model.mark_weights_updated()
    section = WarmupSection(batch_size=8, steps=1)
    with pytest.raises(NonFiniteError, match=r"norm \d\S+, and an operand of a linear in FP8 was infinite; lower"):
        warm_up(model, tokenizer, TASK, section, seed=0, measure=lambda: 0.0)


def test_a_run_from_a_warm_checkpoint_goes_on(tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = policy
    save_model(model, tmp_path / "warm", tokenizer=tokenizer)
    monkeypatch.setattr("octavo.rl.evaluate.Evaluator.mean_reward", lambda *_: 1.0)
    sections = {"model": {"path": str(tmp_path / "warm")}, "warmup": {"steps": 5, "check_prompts": 8}}
    result = run(tiny_config(tmp_path, **sections, trainer={"steps": 1}))
    assert result.warmup == [] and len(result.history) == 1


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (0.5, "the warm start reached a mean reward of 0.50 in step 7; warmup.target_reward = 0.5"),
        (0.4, "warning: the warm start ended at a mean reward of 0.40 in step 7, below warmup.target_reward = 0.5; "),
    ],
)
def test_how_it_ended_is_said(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: float, said: str
) -> None:
    monkeypatch.setattr("octavo.rl.policy.warm_up", lambda *_, **__: [WarmupStep(7, 1.0, reward)])
    config = tiny_config(tmp_path, warmup={"steps": 9, "target_reward": 0.5, "check_prompts": 8})
    progress, told = RLProgress(enabled=False), []
    monkeypatch.setattr(progress, "say", told.append)
    warm_policy(config, *policy, TASK, progress)
    (line,) = told
    assert line.startswith(said)
