"""`octavo demo --ranks N`: sharded training and RL on several ranks of this machine, each compared with one process.

Train in one process; train the same on N ranks, kill one of them on the way, and go on in one process; sample from the
trained model in one process and cut among N ranks; then RL in exact FP8, in one process and on N ranks. What must be
equal is compared in every bit.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.demo.display import Display
from bench.demo.sampling import PROMPTS
from octavo.cli.ranks import torchrun
from octavo.env import child_environment
from octavo.errors import OctavoError
from octavo.run.metrics import METRICS_FILE, Row, read_metrics, read_rows
from octavo.serve import LLM, SamplingParams
from octavo.serve.tensor_workers import LeadingEngine

_STEPS, _KILL_AFTER, _EVERY = 24, 13, 4
_LIMIT_S = 300.0
# of which the micro-batches of training and of RL are multiples, and into which the heads divide
NUM_RANKS = (2, 4, 8)
# what tells of time, and of the ranks themselves
_UNLIKE = ("timing_s/", "perf/", "energy_j/", "engine/", "seconds", "tokens_per_s", "refit/")

TRAIN = """
[model]
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 2
num_attention_heads = 8  # so that up to 8 ranks cut them
num_key_value_heads = 2

[data]
max_bytes = 2_000_000
vocab_size = 512
seq_len = 128
batch_size = 8
micro_batch_size = {micro_batch_size}
cache_dir = "{out}/cache"

[schedule]
warmup_steps = 4

[precision]
recipe = "blockwise"

[parallel]
reduction = "ordered"
timeout_s = 60

[checkpoint]
every = {every}

[metrics]
eval_every = 12
eval_tokens = 2048
tensorboard = false

[run]
steps = {steps}
seed = {seed}
"""

_RL = """
exact = true

[model]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1

[task]
name = "arithmetic"
num_digits = 2

[warmup]
steps = 60
check_every = 20

[rollout]
prompts_per_step = 8
samples_per_prompt = 4
max_tokens = 6
kv_cache_dtype = "fp8"

[trainer]
check_exact_every = 1
steps = 3
micro_batch_sequences = 4  # 8 micro-batches a step

[eval]
every = 3
num_prompts = 12

[parallel]
reduction = "ordered"
timeout_s = 60

[run]
seed = {seed}
save = true
tensorboard = false
report = false
"""


class DemoFailedError(OctavoError, RuntimeError):
    """A command of the demo did not end as it should."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One thing that must be equal, what was compared, and whether it is."""

    what: str
    detail: str
    is_equal: bool


def run_ranks_demo(num_ranks: int, out: Path, seed: int, display: Display) -> bool:
    """Run it in a folder of the demo's own, print the table and write OUT/ranks.json.

    Args:
        num_ranks: of NUM_RANKS.
    Returns:
        Whether all is equal.
    Raises:
        DemoFailedError: a command failed; the text has the end of what it said.
    """
    began = time.monotonic()
    fields = {"out": out, "every": _EVERY, "steps": _STEPS, "seed": seed}
    fields["micro_batch_size"] = max(1, 4 // num_ranks)  # of two micro-batches a rank their order shows
    for name, text in (("train.toml", TRAIN), ("rl.toml", _RL)):
        (out / name).write_text(text.format(**fields), encoding="utf-8")
    display.stage(1, 4, "Train in FP8 in one process")
    _octavo(1, "train", out / "train.toml", out / "one")
    display.stage(2, 4, f"Train the same on {num_ranks} ranks, kill one of them, go on in one process")
    num_done = _train_and_kill(num_ranks, out)
    _octavo(1, "train", out / "train.toml", out / "ranks")
    display.stage(3, 4, f"Sample in one process and cut among {num_ranks} ranks")
    sampled = _compare_samples(out / "one", num_ranks, seed)
    display.stage(4, 4, f"Reinforce in exact FP8, in one process and on {num_ranks} ranks")
    _octavo(1, "rl", out / "rl.toml", out / "rl-one")
    _octavo(num_ranks, "rl", out / "rl.toml", out / "rl-ranks")
    found = [*_compare_training(out, num_ranks, num_done), sampled, *_compare_rl(out)]
    seconds = time.monotonic() - began
    _print(found, num_ranks, seconds, out, display)
    rows = [dataclasses.asdict(each) for each in found]
    (out / "ranks.json").write_text(json.dumps({"ranks": num_ranks, "seconds": seconds, "compared": rows}, indent=2))
    return all(each.is_equal for each in found)


def _command(num_ranks: int, *arguments: str) -> list[str]:
    one = [sys.executable, "-m", "octavo", *arguments]
    return one if num_ranks == 1 else torchrun(num_ranks, "octavo", *arguments)


def _octavo(num_ranks: int, command: str, config: Path, folder: Path) -> None:
    """Run an octavo command to its end."""
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        ended = subprocess.run(
            _command(num_ranks, command, str(config), "--set", f"run.dir={folder}", "--set", "run.device=cpu"),
            stdout=file,
            stderr=file,
            env=child_environment(OMP_NUM_THREADS="1"),
            timeout=_LIMIT_S,
            check=False,
        )
    if ended.returncode:
        raise DemoFailedError(f"octavo {command} on {num_ranks} ranks ended with {ended.returncode}: {_reason(log)}")


def _reason(log: Path) -> str:
    """The first error that a command printed, else the end of what it printed."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    return f"{errors[0] if errors else text[-1500:]} (all of it: {log})"


def _train_and_kill(num_ranks: int, out: Path) -> int:
    """Start the ranks, kill the last one after some steps; returns the steps that were written by then."""
    folder, log = out / "ranks", out / "ranks-killed.log"
    arguments = ["train", str(out / "train.toml"), "--set", f"run.dir={folder}", "--set", "run.device=cpu"]
    with log.open("w", encoding="utf-8") as file:
        job = subprocess.Popen(
            _command(num_ranks, *arguments), stdout=file, stderr=file, env=child_environment(OMP_NUM_THREADS="1")
        )
        try:
            deadline = time.monotonic() + _LIMIT_S
            while len(read_metrics(folder / METRICS_FILE)) < _KILL_AFTER:
                if job.poll() is not None or time.monotonic() > deadline:
                    raise DemoFailedError(f"{num_ranks} ranks did not get to step {_KILL_AFTER}: {_reason(log)}")
                time.sleep(0.02)
            os.kill(max(children(job.pid)), signal.SIGKILL)
            job.wait(timeout=_LIMIT_S)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
    return len(read_metrics(folder / METRICS_FILE))


def children(parent: int) -> Iterator[int]:
    """Processes that a process has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            yield int(stat.parent.name)


def _compare_training(out: Path, num_ranks: int, num_done: int) -> Iterator[Comparison]:
    one, ranks = (numbers(out / name / METRICS_FILE) for name in ("one", "ranks"))
    killed = f"{_KILL_AFTER} steps on {num_ranks} ranks, one killed at step {num_done}; the rest in one process"
    yield Comparison("training: loss, gradient norm, validation loss", f"{len(one)} steps; {killed}", one == ranks)
    yield compare_files("training: weights", *(out / name / "checkpoints" for name in ("one", "ranks")))


def numbers(metrics: Path) -> list[list[float | None]]:
    """Step, loss, learning rate, gradient norm and validation loss of each row."""
    rows: list[Row] = read_metrics(metrics)
    return [[row.step, row.loss, row.lr, row.grad_norm, row.val_loss] for row in rows]


def _compare_samples(model: Path, num_ranks: int, seed: int) -> Comparison:
    """Sample from a trained model in one process, then with its linears cut among the ranks."""
    one, cut = (_sample(model, size, seed) for size in (1, num_ranks))
    num_tokens = sum(len(token_ids) for token_ids, _ in one)
    detail = f"{num_tokens} tokens, linears cut among {num_ranks} ranks, FP8 KV cache"
    return Comparison("sampling: tokens and logprobs", detail, num_tokens > 0 and one == cut)


def _sample(model: Path, num_ranks: int, seed: int) -> list[tuple[list[int], list[float]]]:
    """Token ids and their logprobs, of each prompt."""
    # rowwise: 128 columns are too few for a block a rank
    numerics: dict[str, Any] = {"quantization": "rowwise", "kv_cache_dtype": "fp8", "exact": True, "device": "cpu"}
    llm = LLM(model, **numerics, seed=seed, tensor_parallel_size=num_ranks)
    outputs = [each.outputs[0] for each in llm.generate(list(PROMPTS), SamplingParams(max_tokens=32, logprobs=0))]
    if isinstance(llm.engine, LeadingEngine):
        llm.engine.workers.close()
    return [(each.token_ids, each.logprobs.sampled) for each in outputs if each.logprobs is not None]


def _compare_rl(out: Path) -> Iterator[Comparison]:
    one, ranks = (read_rows(out / name / METRICS_FILE, _alike) for name in ("rl-one", "rl-ranks"))
    worst = max(row["mismatch/logprob_abs_diff_max"] for row in ranks)
    yield Comparison("RL: rewards, losses, all metrics but times", f"{len(one)} steps", bool(one) and one == ranks)
    yield Comparison("RL: trainer's logprobs against the sampler's", f"largest difference {worst}", worst == 0.0)
    yield compare_files("RL: weights", *(out / name / "final" for name in ("rl-one", "rl-ranks")))


def _alike(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs from run to run."""
    flat = {**row, **row.pop("metrics", {})}
    return {key: value for key, value in flat.items() if not key.startswith(_UNLIKE)}


def compare_files(what: str, one: Path, ranks: Path) -> Comparison:
    """The newest safetensors files of two folders, byte by byte."""
    names = sorted(path.relative_to(one) for path in one.rglob("model*.safetensors"))
    newest = names[-1:]
    is_equal = bool(newest) and all(_read(one / name) == _read(ranks / name) for name in newest)
    size = sum((one / name).stat().st_size for name in newest)
    return Comparison(what, f"{size:,} bytes", is_equal)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _print(found: Sequence[Comparison], num_ranks: int, seconds: float, out: Path, display: Display) -> None:
    title = f"one process against {num_ranks} ranks, {seconds:.0f} s"
    table = Table("compared", "of", "equal in every bit", title=title, title_justify="left")
    for each in found:
        table.add_row(each.what, each.detail, "yes" if each.is_equal else "NO", style=None if each.is_equal else "red")
    display.console.print()
    display.console.print(table)
    display.console.print(f"runs, logs and ranks.json: {out}", soft_wrap=True)
