"""The learner's step as the loop makes it: forward, loss over the response tokens, backward, AdamW."""

import dataclasses
import time

import torch

from bench.record import Record, summarize
from bench.report import STEP_TIME
from bench.rl.check import check_gradients
from bench.rl.pace import paced_steps
from bench.rl.synthetic import build_policy, loop_config, model_config, random_rollouts
from bench.rl.workloads import LoopSizes, LoopVariant
from bench.serve.measure import OutOfTimeError
from bench.timing import synchronize
from octavo.errors import BackendError
from octavo.rl.advantage import grpo_advantages
from octavo.rl.learner import Learner, Update, score_rollouts
from octavo.rl.rollout_batch import Rollouts


def measure_learner(
    record: Record, case: str, sizes: LoopSizes, variant: LoopVariant, recipe: str, device: str, deadline: float
) -> str:
    """Check and time one variant of the learner; add its rows.

    Every step sees the same sequences; the sampler's logprobs are the learner's own, scored before each step.

    Returns:
        What to print.
    Raises:
        OutOfTimeError: not one timed step before the deadline.
        AssertionError: the check failed.
        BackendError: a step that made no update.
    """
    config, shape = loop_config(variant, sizes, recipe, device), model_config(sizes)
    checked = check_gradients(shape, config.trainer_numerics, device) if variant.is_fp8 else None
    learner = Learner(build_policy(shape, config.trainer_numerics, device), config)
    rollouts = random_rollouts(sizes, shape.vocab_size)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times_s: list[float] = []
    for step, is_timed in paced_steps(1, sizes.passes, deadline):
        seconds, update = timed_update(learner, rollouts, step)
        times_s += [seconds] if is_timed else []
        print(f"  step {step}{'' if is_timed else ' (warm-up)'}: {seconds:.3f} s", flush=True)
    if not times_s:
        raise OutOfTimeError
    timing = summarize([seconds * 1e6 for seconds in times_s])
    step_s = timing.median_us / 1e6
    record.add_times(case, STEP_TIME, "s", timing, 1e-6)
    num_tokens = sum(map(len, rollouts.sequences))
    record.add(case, "tokens a step", "tokens", num_tokens)
    record.add(case, "learning rate of tokens", "tokens/s", num_tokens / step_s)
    record.add(case, "timed steps", "steps", len(times_s))
    record.add(case, "norm of the gradient", "1", update.metrics["actor/grad_norm"])
    if checked is not None:
        record.add(case, "logprobs' error against bf16's", "share of their spread", checked[0])
        record.add(case, "cosine of the gradients with bf16's", "1", checked[1])
    if device == "cuda":
        record.add(case, "peak memory", "GiB", torch.cuda.max_memory_allocated() / 2**30)
    return f"{step_s:.3f} s a step of {num_tokens} tokens, {num_tokens / step_s:,.0f} tokens/s"


def timed_update(learner: Learner, rollouts: Rollouts, step: int) -> tuple[float, Update]:
    """(seconds of one update from rollouts whose sampler agrees with the learner, what it taught).

    Raises:
        BackendError: nothing was updated.
    """
    config = learner.config
    own = score_rollouts(learner.model, rollouts, config.rollout.temperature, config.trainer.micro_batch_sequences)
    sampled = dataclasses.replace(rollouts, rollout_logprobs=own)
    advantages = grpo_advantages(rollouts.rewards, rollouts.group_ids, norm_by_std=True)
    num_updates = learner.num_updates
    synchronize(learner.model.device)
    began = time.perf_counter()
    update = learner.learn(sampled, advantages, step)
    synchronize(learner.model.device)
    seconds = time.perf_counter() - began
    check_updated(learner, num_updates, step)
    return seconds, update


def check_updated(learner: Learner, num_before: int, step: int) -> None:
    """A step that was skipped would be fast.

    Raises:
        BackendError: not every minibatch of the step made an update.
    """
    made, wanted = learner.num_updates - num_before, learner.config.trainer.minibatches
    if made != wanted:
        raise BackendError(f"step {step} made {made} of {wanted} updates, so its time says nothing")
