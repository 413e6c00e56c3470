"""Importance weights of one policy's rollouts: what they are, and what they change in the gradient."""

import dataclasses
import math

import torch

from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.rl.advantage import grpo_advantages
from octavo.rl.config import RLConfig
from octavo.rl.correction import log_importance_ratio
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.learner import response_logprobs
from octavo.rl.losses import token_coefficients
from octavo.rl.metrics import mismatch_metrics
from octavo.rl.objective import CorrectionProbe, TokenBatch, policy_objective
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.tasks import Task
from octavo.serve import LLM
from octavo.weights.refit import share_weights

_NUM_PROMPTS = 48
_NUM_BINS = 40
_SEED_OFFSET = 77  # keeps the study's prompts apart from those of the steps


@dataclasses.dataclass(frozen=True)
class WeightStudy:
    """Token by token weights pi_trainer / pi_sampler, before truncation.

    Attributes:
        num_tokens: response tokens in all.
        counts: of a histogram of log2 of the weights.
        edges: of its bins, one more entry than counts.
        mismatch: metrics by octavo.rl.metrics' names.
        effect: loss and gradient without and with the truncated weights, by octavo.rl.metrics' names; empty where
            there is no correction.
    """

    num_tokens: int
    counts: list[int]
    edges: list[float]
    mismatch: dict[str, float]
    effect: dict[str, float]


def study_weights(config: RLConfig, model: Decoder, tokenizer: Tokenizer, task: Task) -> WeightStudy:
    """Sample once under the variant's two numerics and compare both sides on the very same rollouts.

    Args:
        model: the policy; its weights stay as they are, its numerics become the variant's trainer's.
    """
    model.set_numerics(config.trainer_numerics)
    sampler = model if config.exact else share_weights(model, config.rollout_numerics)
    rollout = config.rollout
    llm = LLM(sampler, tokenizer=tokenizer, max_num_seqs=rollout.max_num_seqs, seed=config.run.seed + _SEED_OFFSET)
    rollouts = generate_rollouts(
        EmbeddedEngine(llm),
        task,
        task.prompts("train", _NUM_PROMPTS, config.run.seed + _SEED_OFFSET),
        samples_per_prompt=rollout.samples_per_prompt,
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
    )
    logprobs = response_logprobs(model, rollouts, rollout.temperature)
    log_ratio = log_importance_ratio(logprobs, rollouts.rollout_logprobs)
    counts, edges = _histogram(log_ratio / math.log(2.0))
    cap = config.correction.cap
    return WeightStudy(
        num_tokens=len(log_ratio),
        counts=counts,
        edges=edges,
        mismatch=mismatch_metrics(logprobs, rollouts.rollout_logprobs, rollouts.response_lens, cap),
        effect={} if config.correction.kind == "none" else _effect(config, model, rollouts, logprobs),
    )


def _effect(config: RLConfig, model: Decoder, rollouts: Rollouts, logprobs: torch.Tensor) -> dict[str, float]:
    """The policy gradient on these rollouts without and with the weights."""
    algorithm = config.algorithm
    advantages = grpo_advantages(rollouts.rewards, rollouts.group_ids, norm_by_std=algorithm.norm_adv_by_std)
    lens = torch.tensor(rollouts.response_lens)
    batch = TokenBatch(
        rollout_logprobs=rollouts.rollout_logprobs,
        advantages=advantages.repeat_interleave(lens),
        coefficients=token_coefficients(rollouts.response_lens, algorithm.loss_aggregation),
    )
    probe = CorrectionProbe(model)
    probe.add(policy_objective(logprobs, batch, algorithm, config.correction))
    return probe.metrics()


def _histogram(log2_weights: torch.Tensor) -> tuple[list[int], list[float]]:
    """Bins over the values' own range; where all are 0 (exact), one range around it."""
    reach = max(float(log2_weights.abs().max()), 1e-3)
    counts = torch.histc(log2_weights.double(), bins=_NUM_BINS, min=-reach, max=reach)
    return [int(n) for n in counts], torch.linspace(-reach, reach, _NUM_BINS + 1).tolist()
