"""The warm start: it learns the answers, stops at its target, and leaves a warm policy alone."""

import pytest
import torch

from octavo.errors import NonFiniteError
from octavo.models import Decoder, Tokenizer
from octavo.rl.config import WarmupSection
from octavo.rl.tasks import Arithmetic
from octavo.rl.warmup import WarmupStep, warm_up

TASK = Arithmetic(num_digits=1, heldout_share=0.3)


def test_it_learns_and_stops_at_the_target(policy: tuple[Decoder, Tokenizer]) -> None:
    accuracies = iter([0.0, 0.1, 0.5, 0.9])
    seen: list[WarmupStep] = []
    steps = warm_up(
        *policy,
        TASK,
        WarmupSection(steps=100, check_every=10, batch_size=32, target_accuracy=0.5, lr=1e-2),
        seed=0,
        accuracy=lambda: next(accuracies),
        on_step=seen.append,
    )
    assert steps == seen
    assert [step.accuracy for step in steps if step.accuracy is not None] == [0.1, 0.5]
    assert len(steps) == 20
    assert steps[-1].loss < 0.7 * steps[0].loss


def test_a_warm_policy_is_left_alone(policy: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = policy
    before = {name: param.clone() for name, param in model.named_parameters()}
    assert warm_up(model, tokenizer, TASK, WarmupSection(), seed=0, accuracy=lambda: 1.0) == []
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())


def test_a_loss_that_is_not_finite_stops_it(policy: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = policy
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="warm start, step 1: the loss is nan"):
        warm_up(model, tokenizer, TASK, WarmupSection(batch_size=8), seed=0, accuracy=lambda: 0.0)
