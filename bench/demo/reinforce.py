"""The fourth stage: one warm start, then two variants of RL from it: exact, and FP8 rollouts for a bf16 trainer."""

import dataclasses
import itertools
import math
import statistics
import time
from pathlib import Path

from bench.demo.budget import num_steps_within
from bench.demo.display import Display
from bench.demo.sizes import Sizes
from bench.demo.weights import WeightStudy, study_weights
from bench.demo.workers import Tell, Workers
from octavo.models import save_model
from octavo.numerics import Numerics
from octavo.rl import RLConfig, StepRow, run, warm_start
from octavo.rl.config import EvalSection, RLRunSection, RolloutSection, TrainerSection, WarmupSection
from octavo.rl.correction import CorrectionSection
from octavo.rl.policy import build_policy
from octavo.rl.progress import RLProgress
from octavo.rl.warmup import WarmupStep
from octavo.run.sections import ModelSection

EXACT, CORRECTED = "exact", "bf16 trainer + TIS"
VARIANTS = (EXACT, CORRECTED)
_FOLDERS = {EXACT: "exact", CORRECTED: "bf16-trainer-tis"}
_MIN_STEPS, _MAX_STEPS = 6, 400
_TIMED_STEPS = 4  # the first of them is not counted
_NUM_EVALS = 4
_MAX_WARMUP_STEPS = 400
_OVERHEAD_SHARE = 0.12  # evaluations and the weight study, beside the steps


@dataclasses.dataclass(frozen=True)
class ScoredAnswer:
    """A prompt of the last step, its completion and its reward."""

    prompt: str
    completion: str
    reward: float


@dataclasses.dataclass(frozen=True)
class ReinforceVariant:
    """One variant.

    Attributes:
        trainer: its numerics, in words.
        sampler: its numerics, in words.
        rows: a row a step.
        accuracy_before: on held-out problems, by a bf16 greedy engine.
        accuracy_after: the same, after the run.
        study: importance weights of the warm policy's rollouts under this variant's two numerics.
        answers: some of the last step, right ones first.
        seconds: of all of it.
    """

    trainer: str
    sampler: str
    rows: list[StepRow]
    accuracy_before: float
    accuracy_after: float
    study: WeightStudy
    answers: list[ScoredAnswer]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Reinforcement:
    """Both variants and what they share.

    Attributes:
        num_warmup_steps: of the supervised warm start.
        warmup_seconds: of the supervised warm start.
        num_heldout: held-out problems that both were tested on.
        num_sequences: completions a step.
    """

    variants: dict[str, ReinforceVariant]
    num_warmup_steps: int
    warmup_seconds: float
    num_heldout: int
    num_sequences: int

    def num_tokens(self, variant: str) -> int:
        """Response tokens whose logprobs were compared, over all steps of a variant."""
        return round(sum(self.num_sequences * row["response_length/mean"] for row in self.variants[variant].rows))


def warm_up_policy(
    sizes: Sizes, out: Path, seed: int, device: str, workers: Workers, display: Display
) -> tuple[RLConfig, int, float]:
    """Train the arithmetic policy on right answers until sampling is right now and then, and save it.

    Returns:
        (the config of both variants but for precision and steps, warm-up steps, seconds).
    """
    began = time.monotonic()
    config = RLConfig(
        warmup=WarmupSection(steps=_MAX_WARMUP_STEPS),
        rollout=RolloutSection(prompts_per_step=sizes.prompts_per_step),
        trainer=TrainerSection(check_exact_every=1),
        run=RLRunSection(dir=out / "rl" / "warm", seed=seed, device=device, tensorboard=False, save=False),
    )
    accuracy = 0.0
    with display.bars() as bars:

        def on_event(name: str, row: WarmupStep) -> None:
            nonlocal accuracy
            accuracy = accuracy if row.reward is None else row.reward
            bars.update(name, row.step, _MAX_WARMUP_STEPS, f"loss {row.loss:.2f}  sampled accuracy {accuracy:.2f}")

        num_steps = workers.run(_warm_up, {"warm start": config}, on_event)["warm start"]
    display.say(f"warm after {num_steps} steps: {accuracy:.0%} of sampled answers are right")
    start = ModelSection(path=str(_warm_path(config)))
    base = config.model_copy(update={"model": start, "warmup": WarmupSection(steps=0)})
    return base, num_steps, time.monotonic() - began


class _ToldProgress(RLProgress):
    """Hands the warm start's steps on instead of showing them."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(enabled=False)
        self._tell = tell

    def show_warmup(self, row: WarmupStep) -> None:
        self._tell(row)


def _warm_up(config: RLConfig, tell: Tell) -> int:
    """Train and save; gives the number of steps."""
    model, tokenizer, steps = warm_start(config, progress=_ToldProgress(tell))
    save_model(model, _warm_path(config), tokenizer=tokenizer)
    return len(steps)


def _warm_path(config: RLConfig) -> Path:
    return config.run.dir / "model"


def reinforce(
    base: RLConfig,
    num_warmup_steps: int,
    warmup_s: float,
    out: Path,
    seconds: float,
    workers: Workers,
    display: Display,
) -> Reinforcement:
    """Run both variants from the warm start for the same number of steps, as many as fit.

    Args:
        seconds: for calibration and variants together.
    """
    began = time.monotonic()
    with display.working("timing a few steps of each run"):
        step_s = _calibrate(base, out, workers)
    left_s = (seconds - (time.monotonic() - began)) * (1 - _OVERHEAD_SHARE)
    num_steps = num_steps_within(left_s, step_s, least=_MIN_STEPS, most=_MAX_STEPS)
    display.say(f"{num_steps} steps for each run, {step_s:.2f} s a step")
    jobs = {variant: _variant_config(base, variant, num_steps, out / "rl" / _FOLDERS[variant]) for variant in VARIANTS}
    with display.bars() as bars:

        def on_event(variant: str, row: StepRow) -> None:
            status = f"reward {row['reward/mean']:.2f}  max |delta logprob| {row['mismatch/logprob_abs_diff_max']:.1e}"
            bars.update(variant, row.step, num_steps, status)

        results = workers.run(_run_variant, jobs, on_event)
    num_sequences = base.rollout.prompts_per_step * base.rollout.samples_per_prompt
    return Reinforcement(results, num_warmup_steps, warmup_s, base.eval.num_prompts, num_sequences)


def _variant_config(base: RLConfig, variant: str, num_steps: int, directory: Path) -> RLConfig:
    """The exact variant keeps the defaults: FP8 linears and FP8 KV cache on both sides."""
    num_evals = 1 if num_steps == _MIN_STEPS else _NUM_EVALS  # one takes as long as a step
    update: dict[str, object] = {
        "run": base.run.model_copy(update={"dir": directory}),
        "trainer": base.trainer.model_copy(update={"steps": num_steps}),
        "eval": EvalSection(every=math.ceil(num_steps / num_evals), num_prompts=base.eval.num_prompts),
    }
    if variant == CORRECTED:
        update["exact"] = False
        update["trainer"] = base.trainer.model_copy(update={"steps": num_steps, "recipe": "bf16"})
        update["rollout"] = base.rollout.model_copy(update={"recipe": base.trainer.recipe})
        update["correction"] = CorrectionSection(kind="token_tis")
    return base.model_copy(update=update)


def _calibrate(base: RLConfig, out: Path, workers: Workers) -> float:
    """Seconds of a step of both variants together: side by side the slower one's, one after another their sum."""
    jobs = {
        variant: _variant_config(base, variant, _TIMED_STEPS, out / "rl" / "calibration" / _FOLDERS[variant])
        for variant in VARIANTS
    }
    times = workers.run(_time_variant, jobs)
    return max(times.values()) if workers.is_parallel else sum(times.values())


def _time_variant(config: RLConfig, tell: Tell) -> float:
    quick = config.model_copy(update={"eval": EvalSection(num_prompts=8)})
    rows = run(quick, progress=False).history
    return statistics.mean(after.seconds - before.seconds for before, after in itertools.pairwise(rows))


def _run_variant(config: RLConfig, tell: Tell) -> ReinforceVariant:
    began = time.monotonic()
    task = config.task.build()
    model, tokenizer = build_policy(config, task)
    study = study_weights(config, model, tokenizer, task)
    result = run(config, model=model, tokenizer=tokenizer, task=task, on_step=tell, progress=False)
    if result.stopped_by:
        raise KeyboardInterrupt  # a demo does not go on with half a variant
    rollouts = result.last_rollouts
    answers = zip(rollouts.prompts, rollouts.completions, rollouts.rewards.tolist(), strict=True)
    return ReinforceVariant(
        trainer=_in_words(config.trainer_numerics),
        sampler=_in_words(config.rollout_numerics),
        rows=list(result.history),
        accuracy_before=result.heldout_reward_before,
        accuracy_after=result.heldout_reward_after,
        study=study,
        answers=_some_of_both([ScoredAnswer(*answer) for answer in answers]),
        seconds=time.monotonic() - began,
    )


def _some_of_both(answers: list[ScoredAnswer]) -> list[ScoredAnswer]:
    """Up to four right ones, then up to four wrong ones, in their order."""
    right, wrong = ([each for each in answers if (each.reward > 0) is wanted] for wanted in (True, False))
    return right[:4] + wrong[:4]


def _in_words(numerics: Numerics) -> str:
    exact = ", exact" if numerics.exact else ""
    return f"{numerics.recipe.name} linears, {numerics.kv_cache_dtype} keys and values{exact}"
