"""Exact mode at a shape: a rollout's logprobs against those of its scoring, without gradient and with."""

import torch

from bench.record import Record
from bench.report import DELTA, DELTA_WITH_GRADIENT
from bench.rl.synthetic import build_policy, build_worker, loop_config, model_config
from bench.rl.workloads import LoopSizes, LoopVariant
from octavo.rl.learner import response_logprobs, score_rollouts


def measure_exactness(
    record: Record, case: str, sizes: LoopSizes, variant: LoopVariant, recipe: str, device: str
) -> str:
    """Sample, score, compare; add the rows, whatever they say.

    Returns:
        What to print.
    """
    config, shape = loop_config(variant, sizes, recipe, device), model_config(sizes)
    model = build_policy(shape, config.trainer_numerics, device)
    worker = build_worker(config, model, sizes)
    worker.publish()
    rollouts = worker.sample(1)
    scored = score_rollouts(model, rollouts, config.rollout.temperature, sizes.micro_batch)
    part = rollouts.part(0, min(sizes.micro_batch, len(rollouts)))
    learned = response_logprobs(model, part, config.rollout.temperature)
    assert learned.requires_grad, "the learner's pass has a gradient"
    deltas = {
        DELTA: _largest(scored, rollouts.rollout_logprobs),
        DELTA_WITH_GRADIENT: _largest(learned.detach(), part.rollout_logprobs),
    }
    for metric, delta in deltas.items():
        record.add(case, metric, "nats", delta)
    record.add(case, "tokens compared", "tokens", rollouts.num_tokens)
    return f"{rollouts.num_tokens} tokens, " + ", ".join(f"{name} {delta:.3g}" for name, delta in deltas.items())


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """NaN where one is."""
    return (a - b).abs().max().item()


def complaint(record: Record) -> str | None:
    """What is wrong with the comparison, or None."""
    off = {row["metric"]: row["value"] for row in record.rows if row["metric"] in (DELTA, DELTA_WITH_GRADIENT)}
    wrong = {name: value for name, value in off.items() if value != 0.0}
    return f"exact mode promises 0 nats, got {wrong}" if wrong else None
