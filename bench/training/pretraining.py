"""Does FP8 pretrain as well as bf16? Llamas of two sizes on real text, every variant from the same seed and data order.

Runs go side by side as processes; everything measured is written as it happens. A command that reaches its time limit
leaves checkpoints, and the same command on the same machine goes on from there. Make records and plots of the JSON
lines by `python -m bench.training.convergence_report`.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from bench.processes import map_processes, run_jobs
from bench.program import Program
from bench.record import git_commit
from bench.report import NOT_MEASURED, format_table
from bench.training.corpus import CACHE, Corpus, CorpusSettings, make_record, open_corpus
from bench.training.pretraining_run import LEAST_SECONDS, PretrainingJob, State, execute, read_rows
from bench.training.pretraining_sizes import SIZES
from bench.training.pretraining_variants import EXAMPLES, GRAMMAR, parse_variant
from octavo.models import Decoder

DEFAULT_VARIANTS = "bf16,delayed,tensorwise,rowwise,blockwise"
_FORMER = {"--arms": "--variants", "--recipes": "--variants"}  # names of options


def main(arguments: list[str] | None = None) -> int:
    """Run what is left of the runs; 0 where all are done, 3 where another command is to go on, 1 where one failed."""
    options = _parse(arguments)
    corpus = open_corpus(_corpus_settings(options), options.work)
    print(corpus.describe(), flush=True)
    jobs = make_jobs(options, corpus)
    jobs[0].work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    make_record(corpus).save(options.out, options.commit)
    print(f"about {estimate_minutes(jobs):.1f} minutes of the device are left to do", flush=True)
    target, failures = options.out / f"pretraining-{options.size}.jsonl", []

    def look(under_way: list[PretrainingJob]) -> None:
        collect(jobs[0].work, target)
        if under_way:
            print(_progress(under_way), flush=True)

    for stage in (False, True):  # a variant that switches begins where its parent's middle is
        left = [job for job in jobs if (job.parent is not None) is stage and not job.has("finished")]
        failures += run_jobs(left, options.jobs, _run_in_process, look)
    collect(jobs[0].work, target)
    print(format_summary(jobs))
    for failure in failures:
        print(f"FAILED {failure}")
    num_left = sum(not job.has("finished") for job in jobs)
    print(f"{num_left} of {len(jobs)} runs are not finished" if num_left else f"all {len(jobs)} runs are finished")
    return 1 if failures else 3 if num_left else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Program("bench.training.pretraining", __doc__, out=Path("runs/pretraining"), former=_FORMER)
    parser.add_argument("--size", choices=list(SIZES), default="50m")
    parser.add_argument(
        "--variants", default=DEFAULT_VARIANTS, help=f"with commas; each is {GRAMMAR}; such as {EXAMPLES}"
    )
    parser.add_argument("--seeds", default="0", help="seeds, with commas")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: the size's own")
    parser.add_argument("--tokens-per-step", type=int, default=32768, help="a multiple of the size's seq_len")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--downstream", action="store_true", help="cloze, and tasks after fine-tuning")
    parser.add_argument("--minutes", type=float, default=9.0, help="checkpoint and stop after so long")
    parser.add_argument("--corpus-mb", type=int, help="megabytes of text at most")
    parser.add_argument("--work", type=Path, default=CACHE, help="folder of tokens, results and checkpoints")
    options = parser.parse(arguments)
    options.end = time.time() + 60 * options.minutes
    if options.tokens_per_step % SIZES[options.size].seq_len:
        parser.error(f"--tokens-per-step must be a multiple of {SIZES[options.size].seq_len}")
    return options


def _corpus_settings(options: argparse.Namespace) -> CorpusSettings:
    settings = CorpusSettings(vocab_size=SIZES[options.size].vocab_size)
    if options.corpus_mb is None:
        return settings
    num_bytes = options.corpus_mb * 1_000_000
    return dataclasses.replace(settings, max_bytes=num_bytes, enough_bytes=num_bytes, bpe_bytes=num_bytes)


def make_jobs(options: argparse.Namespace, corpus: Corpus) -> list[PretrainingJob]:
    """One job a variant and seed: the first seed's variants first.

    Raises:
        ConfigError: no variant's name, or one with layers or modules that the size does not have.
    """
    variants = [parse_variant(name) for name in options.variants.split(",")]
    model = Decoder(SIZES[options.size].model_config(corpus.meta["vocab_size"]), device="meta")
    for variant in variants:
        variant.check_model(model)
    parents = {variant.parent for variant in variants}
    steps = options.steps or SIZES[options.size].steps
    folder = f"{options.size}-{steps}x{options.tokens_per_step}-{corpus.meta['sha256'][:8]}"
    return [
        PretrainingJob(
            variant=variant.name,
            seed=int(seed),
            size=options.size,
            steps=steps,
            tokens_per_step=options.tokens_per_step,
            corpus=corpus.folder,
            work=options.work / folder,
            device=options.device,
            deadline=options.end,
            keep_middle=variant.name in parents,
            downstream=options.downstream,
            side_by_side=options.jobs,
            commit=options.commit or git_commit(),
        )
        for seed in options.seeds.split(",")
        for variant in variants
    ]


def estimate_minutes(jobs: list[PretrainingJob], flops_per_s: float = 350e12) -> float:
    """What the unfinished runs need where six FLOPs a parameter and token run at this rate (of an H200, in bf16)."""
    total = 0.0
    for job in jobs:
        params = SIZES[job.size].model_config(SIZES[job.size].vocab_size).num_params
        share = 0.0 if job.has("end") else 1.0 if job.parent is None else 0.5
        total += share * 6.0 * params * job.tokens_per_step * job.steps
    return total / flops_per_s / 60


def _run_in_process(job: PretrainingJob) -> State:
    if job.deadline - time.time() < LEAST_SECONDS:  # a process would only find that out after its start
        return "waiting"
    return next(map_processes(execute, [(job,)], 1, num_threads=2))


def _progress(jobs: Iterable[PretrainingJob]) -> str:
    parts = []
    for job in jobs:
        rows = [row for row in read_rows(job.results) if row["kind"] == "steps"]
        if rows:
            rate = len(rows[-1]["loss"]) / rows[-1]["seconds"]
            parts.append(f"{job.name} {rows[-1]['step']}: {rows[-1]['loss'][-1]:.3f} ({rate:.1f} steps/s)")
    return "; ".join(parts) or "starting"


def collect(work: Path, target: Path) -> None:
    """All runs' lines in one file."""
    with contextlib.suppress(FileNotFoundError):
        target.write_text("".join(path.read_text() for path in sorted(work.glob("*.jsonl"))))


def format_summary(jobs: list[PretrainingJob]) -> str:
    """For people: a line a run that has come to its end."""
    ends = {(job.variant, job.seed): row for job in jobs for row in read_rows(job.results) if row["kind"] == "end"}
    scores = {
        (job.variant, job.seed): row for job in jobs for row in read_rows(job.results) if row["kind"] == "downstream"
    }
    lines = []
    for (variant, seed), end in ends.items():
        base = ends.get(("bf16", seed))
        gap = f"{100 * (end['loss'] / base['loss'] - 1):+.3f} %" if base else NOT_MEASURED
        rest = {k: v for k, v in scores.get((variant, seed), {}).items() if k not in ("kind", "run")}
        losses = (f"{end['loss']:.4f}", gap, f"{end['bf16_loss']:.4f}")
        lines.append((variant, str(seed), *losses, f"{end['tokens_per_s']:,.0f}", json.dumps(rest) if rest else ""))
    return format_table(("variant", "seed", "loss", "to bf16", "in bf16", "tokens/s", "downstream"), lines)


if __name__ == "__main__":
    sys.exit(main())
