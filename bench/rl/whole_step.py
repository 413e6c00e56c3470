"""Whole steps of the loop by its own parts: sampling, scoring, learning, refit, each with its time and energy."""

import contextlib
import dataclasses
import statistics

import torch

from bench.clocks import ClockSamples, add_clocks, sample_clocks
from bench.record import Record, summarize
from bench.report import STEP_TIME
from bench.rl.check import check_gradients
from bench.rl.learning import check_updated
from bench.rl.pace import paced_steps
from bench.rl.synthetic import build_policy, build_worker, loop_config, model_config
from bench.rl.workloads import LoopSizes, LoopVariant
from bench.serve.check import check_nearness
from bench.serve.measure import OutOfTimeError
from bench.timing import synchronize
from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.errors import BackendError
from octavo.models import ModelConfig
from octavo.rl.advantage import grpo_advantages
from octavo.rl.config import RLConfig
from octavo.rl.learner import Learner
from octavo.rl.phases import JOULES, SECONDS, PhaseMeter
from octavo.rl.ranks import Ranks
from octavo.rl.rollout_batch import Rollouts
from octavo.run.energy import energy_counter

GEN, SCORE, LEARN, REFIT = "gen", "old_log_prob", "update_actor", "refit"
METRICS = {GEN: "sampling", SCORE: "scoring", LEARN: "learning", REFIT: "refit"}


@dataclasses.dataclass(frozen=True)
class LoopStep:
    """One step.

    Attributes:
        times: what PhaseMeter tells.
        num_tokens: of prompts and responses.
        max_delta: largest difference of a logprob between the sides, in nats.
        k3: mismatch KL a token, in nats.
        checked_share: of the tokens, those whose difference was measured.
        num_preemptions: sequences that the sampler took back.
    """

    times: dict[str, float]
    num_tokens: int
    max_delta: float
    k3: float
    checked_share: float
    num_preemptions: float


def measure_whole_step(
    record: Record, case: str, sizes: LoopSizes, variant: LoopVariant, recipe: str, device: str, deadline: float
) -> str:
    """Check and time one variant of the loop: one step to warm up, then sizes.passes; add its rows.

    Returns:
        What to print.
    Raises:
        OutOfTimeError: not one timed step before the deadline.
        AssertionError: the check failed.
        ExactnessError: exact mode, and a trainer's logprob is not the sampler's.
        BackendError: a step that made no update, or a response of another length than was asked for.
    """
    config, shape = loop_config(variant, sizes, recipe, device), model_config(sizes)
    _check(config, shape, device, variant, is_toy=sizes.is_toy)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.closing(Loop(config, shape, sizes, device)) as loop:
        steps, clocks = list[LoopStep](), list[ClockSamples]()
        for number, is_timed in paced_steps(1, sizes.passes, deadline):
            with sample_clocks(device) as sampled:
                step = loop.step(number)
            if is_timed:
                steps.append(step)
                clocks.append(sampled)
            print(f"  step {number}{'' if is_timed else ' (warm-up)'}: {_show(step)}", flush=True)
    if not steps:
        raise OutOfTimeError
    _add_rows(record, case, steps)
    add_clocks(record, case, clocks)
    if device == "cuda":
        record.add(case, "peak memory", "GiB", torch.cuda.max_memory_allocated() / 2**30)
    return f"{statistics.median(s.times[SECONDS + 'step'] for s in steps):.2f} s a step, over {len(steps)}"


class Loop:
    """The parts of octavo.rl.trainer, wired together without evaluation and files; on the ranks of a mesh or alone."""

    def __init__(
        self, config: RLConfig, shape: ModelConfig, sizes: LoopSizes, device: str, mesh: Mesh = ONE_PROCESS
    ) -> None:
        self.sizes, self.device = sizes, device
        model = build_policy(shape, config.trainer_numerics, device)
        ranks = Ranks.shard(config, mesh, model, None) if mesh.world_size > 1 else None
        self.worker = build_worker(config, model, sizes, ranks)
        self.learner = ScoringLearner(model, config, mesh=mesh)
        self.joules, _ = energy_counter(device)
        self.worker.publish()

    def close(self) -> None:
        """Let go of the engine."""
        self.worker.close()

    def step(self, number: int) -> LoopStep:
        """Sample, score, learn, refit, as octavo.rl.trainer does."""
        learner = self.learner
        num_updates, num_preemptions = learner.num_updates, self._num_preemptions()
        synchronize(self.device)
        meter = learner.meter = self.make_meter()
        rollouts = self.worker.sample(number)
        advantages = grpo_advantages(rollouts.rewards, rollouts.group_ids, norm_by_std=True)
        self._end(meter, GEN)
        update = learner.learn(rollouts, advantages, number)
        self._end(meter, LEARN)
        self.worker.finish_step(rollouts)
        self._end(meter, REFIT)
        check_updated(learner, num_updates, number)
        if set(rollouts.response_lens) != {self.sizes.max_tokens}:
            raise BackendError(f"responses were to have {self.sizes.max_tokens} tokens each")
        return LoopStep(
            times=meter.metrics(),
            num_tokens=sum(map(len, rollouts.sequences)),
            max_delta=(update.trainer_logprobs - rollouts.rollout_logprobs).abs().max().item(),
            k3=update.metrics["rollout_corr/k3_kl"],
            checked_share=update.metrics["mismatch/tokens_checked_share"],
            num_preemptions=self._num_preemptions() - num_preemptions,
        )

    def make_meter(self) -> PhaseMeter:
        """Of one step."""
        return PhaseMeter(self.joules)

    def _end(self, meter: PhaseMeter, phase: str) -> None:
        synchronize(self.device)  # the loop itself lets the GPU run on into the next phase
        meter.end(phase)

    def _num_preemptions(self) -> float:
        return self.worker.engine.stats().get("num_preemptions", 0.0)  # ranks tell after their first batch


class ScoringLearner(Learner):
    """A Learner that tells scoring, which comes before the step's first update, from learning."""

    meter: PhaseMeter | None = None

    def _old_logprobs(self, rollouts: Rollouts, size: int, step: int) -> tuple[torch.Tensor, int]:
        found = super()._old_logprobs(rollouts, size, step)
        assert self.meter is not None, "set before each step"
        synchronize(self.model.device)
        self.meter.end(SCORE)
        return found


def _check(config: RLConfig, shape: ModelConfig, device: str, variant: LoopVariant, *, is_toy: bool) -> None:
    """The sampler's logprobs and the trainer's gradients, on two layers of the shape."""
    check_shape = dataclasses.replace(shape, max_position_embeddings=max(shape.max_position_embeddings, 256))
    check_nearness(check_shape, config.rollout_numerics, device, quick=is_toy)
    if variant.is_fp8:
        check_gradients(shape, config.trainer_numerics, device)


def _add_rows(record: Record, case: str, steps: list[LoopStep]) -> None:
    times = [step.times[SECONDS + "step"] for step in steps]
    record.add_times(case, STEP_TIME, "s", summarize(times))
    for phase, metric in METRICS.items():
        record.add_times(case, f"time of {metric}", "s", summarize([step.times[SECONDS + phase] for step in steps]))
        if JOULES + phase in steps[0].times:
            record.add(case, f"energy of {metric}", "J", statistics.median(s.times[JOULES + phase] for s in steps))
    record.add(case, "throughput of the step", "tokens/s", steps[-1].num_tokens / statistics.median(times))
    record.add(case, "preemptions", "sequences", max(step.num_preemptions for step in steps))
    record.add(case, "largest difference of logprobs", "nats", max(step.max_delta for step in steps))
    record.add(case, "mismatch KL", "nats", max(step.k3 for step in steps))
    record.add(case, "share of tokens compared", "share", min(step.checked_share for step in steps))
    record.add(case, "timed steps", "steps", len(steps))


def _show(step: LoopStep) -> str:
    phases = ", ".join(f"{metric} {step.times[SECONDS + phase]:.2f}" for phase, metric in METRICS.items())
    return f"{step.times[SECONDS + 'step']:.2f} s ({phases}), largest difference of logprobs {step.max_delta:.3g}"
