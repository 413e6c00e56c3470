"""Does the exact arm learn? GRPO on two-digit addition from a weak warm start, held-out accuracy before and after.

Evaluation is by a greedy bf16 engine on problems that training never sees. The gate: every seed climbs by at least
0.25 absolute, and no step has a logprob that differs between trainer and sampler.
"""

import argparse
import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from octavo.rl import RLConfig, run
from octavo.rl.config import EvalSection, RunSection
from octavo.testing.bench import Record

MIN_CLIMB = 0.25
NUM_EVAL_PROMPTS = 512
RECORDS = Path(__file__).parent / "records"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One seed's run.

    Attributes:
        before, after: held-out accuracy, bf16 and greedy, after the warm start and after the last step.
        reward_before, reward_after: mean sampled reward of the first and of the last five steps.
        max_abs_diff: the largest |trainer's - sampler's logprob| over all tokens of all steps.
        num_tokens: response tokens that were compared.
        seconds: warm start and steps, one thread.
    """

    seed: int
    before: float
    after: float
    reward_before: float
    reward_after: float
    max_abs_diff: float
    num_tokens: int
    seconds: float

    @property
    def climb(self) -> float:
        """Absolute gain in held-out accuracy."""
        return self.after - self.before


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write the record; 0 where the gate holds."""
    options = _parse(arguments)
    outcomes = sorted(_run_all(options.seeds, options.steps, options.processes), key=lambda outcome: outcome.seed)
    complaints = find_complaints(outcomes)
    for complaint in complaints:
        print(f"GATE: {complaint}")
    if options.quick:
        print("too short a run to be a record: nothing was written, the gate does not count")
        return 0
    print(f"record: {make_record(outcomes, options.steps).save(options.out, options.commit)}")
    return 1 if complaints else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl_learning", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds")
    parser.add_argument("--steps", type=int, default=120, help="rollout steps of each run, of 256 completions each")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--quick", action="store_true", help="1 seed of 3 steps, no record: does it run at all?")
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.steps = 1, 3
    return options


def make_config(seed: int, num_steps: int, directory: Path) -> RLConfig:
    """The defaults, which are those of recipes/rl_arithmetic.toml: blockwise FP8, FP8 KV cache, exact."""
    config = RLConfig(
        eval=EvalSection(num_prompts=NUM_EVAL_PROMPTS),
        run=RunSection(dir=directory, seed=seed, device="cpu", tensorboard=False, save=False),
    )
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": num_steps})})


def _run_all(num_seeds: int, num_steps: int, num_processes: int) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(num_processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        futures = [pool.submit(_run, seed, num_steps, Path(scratch) / str(seed)) for seed in range(num_seeds)]
        for future in as_completed(futures):
            outcome = future.result()
            outcomes.append(outcome)
            print(
                f"seed {outcome.seed}: held-out accuracy {outcome.before:.3f} -> {outcome.after:.3f} "
                f"({outcome.climb:+.3f}), sampled reward {outcome.reward_before:.3f} -> {outcome.reward_after:.3f}, "
                f"max |delta logprob| {outcome.max_abs_diff} over {outcome.num_tokens:,} tokens, "
                f"{outcome.seconds:.0f} s",
                flush=True,
            )
    return outcomes


def _run(seed: int, num_steps: int, directory: Path) -> Outcome:
    began = time.monotonic()
    config = make_config(seed, num_steps, directory)
    result = run(config, progress=False)
    rewards = [row["reward/mean"] for row in result.history]
    num_sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    return Outcome(
        seed=seed,
        before=result.accuracy_before,
        after=result.accuracy_after,
        reward_before=statistics.fmean(rewards[:5]),
        reward_after=statistics.fmean(rewards[-5:]),
        max_abs_diff=max(row["mismatch/logprob_abs_diff_max"] for row in result.history),
        num_tokens=round(sum(row["response_length/mean"] for row in result.history) * num_sequences),
        seconds=time.monotonic() - began,
    )


def find_complaints(outcomes: list[Outcome]) -> list[str]:
    """Why the gate does not hold; empty where it does."""
    complaints = []
    for outcome in outcomes:
        if outcome.climb < MIN_CLIMB:
            complaints.append(f"seed {outcome.seed} climbs by {outcome.climb:+.3f}, less than {MIN_CLIMB}")
        if outcome.max_abs_diff != 0.0:
            complaints.append(f"seed {outcome.seed} has a logprob that differs by {outcome.max_abs_diff}")
    return complaints


def make_record(outcomes: list[Outcome], num_steps: int) -> Record:
    """The record: accuracy after, with that of the warm start beside it, for each seed."""
    what = (
        f"Held-out accuracy ({NUM_EVAL_PROMPTS} problems, bf16 engine, greedy) of GRPO on two-digit addition after "
        f"{num_steps} steps of 256 completions, recipes/rl_arithmetic.toml: blockwise FP8 linears and FP8 KV cache on "
        f"both sides, exact. Gate: every seed climbs by >= {MIN_CLIMB} over its warm start, and every step's "
        "max |trainer's - sampler's logprob| is 0."
    )
    record = Record("rl_learning", what, device="cpu")
    for outcome in outcomes:
        case = f"exact, seed {outcome.seed}"
        record.add(
            case, "held-out accuracy", "share", outcome.after, peer="after the warm start", peer_value=outcome.before
        )
        record.add(
            case,
            "sampled reward, mean of the last 5 steps",
            "share",
            outcome.reward_after,
            peer="of the first 5 steps",
            peer_value=outcome.reward_before,
        )
        record.add(case, "max |delta logprob|", "nats", outcome.max_abs_diff)
        record.add(case, "response tokens compared", "tokens", outcome.num_tokens)
        record.add(case, "wall time, one thread", "s", outcome.seconds)
    climbs = [outcome.climb for outcome in outcomes]
    record.add("exact, all seeds", "smallest climb of held-out accuracy", "share", min(climbs))
    record.add("exact, all seeds", "mean climb of held-out accuracy", "share", statistics.fmean(climbs))
    return record


if __name__ == "__main__":
    sys.exit(main())
