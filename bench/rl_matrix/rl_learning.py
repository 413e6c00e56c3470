"""Does exact FP8 learn as bf16 does? GRPO on two-digit addition from a weak warm start that both variants share.

Evaluation is by a greedy bf16 engine on problems that training never sees. The gate: every exact seed climbs by at
least 0.25 absolute, no exact step has a logprob that differs between trainer and sampler, and the exact variant's mean
accuracy is at most 0.05 below that of the bf16 control (no FP8, not exact: the ordinary stack).
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.outcome import finish_gate
from bench.processes import map_processes
from bench.record import Record
from octavo.rl import RLConfig, run
from octavo.rl.config import EvalSection, RLRunSection

VARIANTS: dict[str, dict[str, object]] = {"exact": {}, "bf16": {"exact": False, "precision": "bf16"}}
MIN_CLIMB = 0.25
MAX_GAP = 0.05  # of mean accuracy below the control's: two standard errors of a difference of means over 3 seeds
NUM_EVAL_PROMPTS = 512
RECORDS = Path(__file__).parent.parent / "records"


@dataclasses.dataclass(frozen=True)
class LearningRun:
    """One seed's run.

    Attributes:
        variant: a key of VARIANTS.
        before: held-out accuracy, bf16 and greedy, after the warm start.
        after: held-out accuracy, bf16 and greedy, after the last step.
        reward_before: mean sampled reward of the first five steps.
        reward_after: mean sampled reward of the last five steps.
        max_abs_diff: the largest |trainer's - sampler's logprob| over all tokens of all steps.
        num_tokens: response tokens that were compared.
        seconds: warm start and steps, one thread.
    """

    variant: str
    seed: int
    before: float
    after: float
    reward_before: float
    reward_after: float
    max_abs_diff: float
    num_tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.variant}, seed {self.seed}: held-out accuracy {self.before:.3f} -> {self.after:.3f} "
            f"({self.climb:+.3f}), sampled reward {self.reward_before:.3f} -> {self.reward_after:.3f}, max |delta "
            f"logprob| {self.max_abs_diff} over {self.num_tokens:,} tokens, {self.seconds:.0f} s"
        )

    @property
    def climb(self) -> float:
        """Absolute gain in held-out accuracy."""
        return self.after - self.before


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write the record; 0 where the gate holds."""
    options = _parse(arguments)
    keys = [(variant, seed) for variant in VARIANTS for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as scratch:
        cases = [(variant, seed, options.steps, Path(scratch) / f"{variant}-{seed}") for variant, seed in keys]
        found = {(run.variant, run.seed): run for run in map_processes(_run, cases, options.processes, show=str)}
    outcomes = [found[key] for key in keys]
    record = make_record(outcomes, options.steps)
    return finish_gate(record, find_complaints(outcomes), options.out, options.commit, is_whole=not options.quick)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rl_matrix.rl_learning", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each variant")
    parser.add_argument("--steps", type=int, default=120, help="rollout steps of each run, of 256 completions each")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument(
        "--quick", action="store_true", help="1 seed of 3 steps a variant, no record: does it run at all?"
    )
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.steps = 1, 3
    return options


def make_config(variant: str, seed: int, num_steps: int, directory: Path) -> RLConfig:
    """The defaults, configs/rl_arithmetic.toml's (blockwise FP8, FP8 KV cache, exact), and the variant's own."""
    config = RLConfig(
        **VARIANTS[variant],  # type: ignore[arg-type]
        eval=EvalSection(num_prompts=NUM_EVAL_PROMPTS),
        run=RLRunSection(dir=directory, seed=seed, device="cpu", tensorboard=False, save=False),
    )
    update = {"steps": num_steps, "check_exact_every": 1}  # the gate speaks of all tokens
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})


def _run(variant: str, seed: int, num_steps: int, directory: Path) -> LearningRun:
    began = time.monotonic()
    config = make_config(variant, seed, num_steps, directory)
    result = run(config, progress=False)
    rewards = [row["reward/mean"] for row in result.history]
    num_sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    return LearningRun(
        variant=variant,
        seed=seed,
        before=result.heldout_reward_before,
        after=result.heldout_reward_after,
        reward_before=statistics.fmean(rewards[:5]),
        reward_after=statistics.fmean(rewards[-5:]),
        max_abs_diff=max(row["mismatch/logprob_abs_diff_max"] for row in result.history),
        num_tokens=round(sum(row["response_length/mean"] for row in result.history) * num_sequences),
        seconds=time.monotonic() - began,
    )


def find_complaints(outcomes: list[LearningRun]) -> list[str]:
    """Why the gate does not hold; empty where it does."""
    complaints = []
    for outcome in outcomes:
        if outcome.variant != "exact":
            continue
        if outcome.climb < MIN_CLIMB:
            complaints.append(f"seed {outcome.seed} climbs by {outcome.climb:+.3f}, less than {MIN_CLIMB}")
        if outcome.max_abs_diff != 0.0:
            complaints.append(f"seed {outcome.seed} has a logprob that differs by {outcome.max_abs_diff}")
    gap = statistics.fmean(gaps_to_control(outcomes))
    if gap < -MAX_GAP:
        complaints.append(
            f"mean held-out accuracy is {gap:+.3f} from the bf16 control's, at most -{MAX_GAP} is allowed"
        )
    return complaints


def gaps_to_control(outcomes: list[LearningRun]) -> list[float]:
    """Held-out accuracy of each exact seed less that of the control with the same seed, which began alike."""
    after = {(outcome.variant, outcome.seed): outcome.after for outcome in outcomes}
    return [value - after["bf16", seed] for (variant, seed), value in after.items() if variant == "exact"]


def make_record(outcomes: list[LearningRun], num_steps: int) -> Record:
    """The record: accuracy after, with the warm start's beside it, of each variant and seed; and the gap of both."""
    what = (
        f"Held-out accuracy ({NUM_EVAL_PROMPTS} problems, bf16 engine, greedy) of GRPO on two-digit addition after "
        f"{num_steps} steps of 256 completions, configs/rl_arithmetic.toml. exact: blockwise FP8 linears and FP8 KV "
        "cache on both sides. bf16: no FP8 on either side, not exact, all else alike; both begin from one warm start. "
        "Of all seeds: the mean, and the smallest and the largest of a seed as p20 and p80. Gate: every exact seed "
        f"climbs by >= {MIN_CLIMB}, its max |trainer's - sampler's logprob| is 0 at every step, and the mean gap "
        f"to bf16 is >= -{MAX_GAP}."
    )
    record = Record("rl_learning", what, device="cpu")
    for outcome in outcomes:
        _add_outcome(record, outcome)
    for variant in VARIANTS:
        climbs = [outcome.climb for outcome in outcomes if outcome.variant == variant]
        after = [outcome.after for outcome in outcomes if outcome.variant == variant]
        case = f"{variant}, all seeds"
        record.add_mean(case, "held-out accuracy", "share", after)
        record.add_mean(case, "climb of held-out accuracy", "share", climbs)
    metric = "held-out accuracy to bf16's, seed by seed"
    record.add_mean("exact, all seeds", metric, "share", gaps_to_control(outcomes))
    return record


def _add_outcome(record: Record, outcome: LearningRun) -> None:
    case = f"{outcome.variant}, seed {outcome.seed}"
    first, last = outcome.reward_before, outcome.reward_after
    record.add(
        case, "held-out accuracy", "share", outcome.after, peer="after the warm start", peer_value=outcome.before
    )
    metric = "sampled reward, mean of the last 5 steps"
    record.add(case, metric, "share", last, peer="of the first 5 steps", peer_value=first)
    record.add(case, "max |delta logprob|", "nats", outcome.max_abs_diff)
    record.add(case, "response tokens compared", "tokens", outcome.num_tokens)
    record.add(case, "wall time, one thread", "s", outcome.seconds)


if __name__ == "__main__":
    sys.exit(main())
