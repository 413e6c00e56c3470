"""`octavo bench scale --gpus N`: what is asked of more GPUs than two, each part a command of less than ten minutes.

Correctness comes first, and the smallest number of GPUs. A part that fails leaves the others, and its record as far as
it came. At the end of each number stands what was expected (bench.speed.scale.expected) beside what was measured.
"""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.jobs import join_records
from bench.options import BenchOptions
from bench.processes import ROOT, visible_gpus
from bench.ranks import command_of, environment
from bench.speed.scale.expected import compare
from octavo.errors import BackendError, ConfigError, did_you_mean

# Name -> the program and the parts of it; in this order.
PARTS = {
    "ordered": ("scale", ("ordered",)),
    "bits": ("tensor", ("bits",)),
    "restart": ("restart", ()),
    "comm": ("comm", ()),
    "whole": ("scale", ("whole",)),
    "whole_2k": ("scale", ("whole_2k",)),
    "layers18": ("scale", ("layers18",)),
    "large": ("tensor", ("large_mixed",)),
    "grpo": ("scale", ("grpo",)),
}
OUT, LIMIT_S = Path("runs/scale"), 590.0


def run_parts(gpus: Sequence[int], names: Sequence[str], options: BenchOptions) -> bool:
    """Run parts on each number of GPUs; records go to OUT/N_gpus/PART, joined ones to OUT/N_gpus/records.

    Args:
        gpus: how many, 2 at least.
        names: of PARTS, all for none.
        options: device, quick, out and commit.
    Returns:
        Whether all went well.
    Raises:
        ConfigError: an unknown part.
        BackendError: there are fewer GPUs.
    """
    if unknown := [name for name in names if name not in PARTS]:
        raise ConfigError(
            f"--parts must be of {', '.join(PARTS)}, got {unknown[0]!r}{did_you_mean(unknown[0], tuple(PARTS))}"
        )
    num_there = len(visible_gpus())
    if options.device == "cuda" and max(gpus) > num_there:
        raise BackendError(
            f"--gpus must be at most the GPUs of this machine, {num_there}, got {max(gpus)}; ask for fewer"
        )
    failed = []
    for num_gpus in sorted(set(gpus)):
        folder = ((options.out or OUT) / f"{num_gpus}_gpus").resolve()
        for name in (name for name in PARTS if not names or name in names):
            print(f"{num_gpus} GPUs: {name}", flush=True)
            began = time.monotonic()
            if code := _run(_command(name, num_gpus, dataclasses.replace(options, out=folder / name))):
                failed.append(f"{name} on {num_gpus} GPUs: {code}")
            print(f"{num_gpus} GPUs: {name}: {code or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
        records = join_records(
            [p for name in PARTS for p in sorted((folder / name).glob("*.json"))], folder / "records"
        )
        print(*records, *([] if options.quick else compare(folder / "records", num_gpus)), sep="\n", flush=True)
    for line in failed:
        print(f"COMPLAINT: {line}", flush=True)
    return not failed


def _command(name: str, num_gpus: int, options: BenchOptions) -> list[str]:
    program, only = PARTS[name]
    assert options.out is not None, "each part has a folder"
    if program != "restart":
        return command_of(program, dataclasses.replace(options, filters=only), num_gpus)
    command = [sys.executable, "-m", "bench.speed.scale.restart", "--ranks", str(num_gpus), "--device", options.device]
    command += ["--out", str(options.out), *(["--toy"] if options.quick else [])]
    return command + (["--commit", options.commit] if options.commit else [])


def _run(command: list[str]) -> str:
    """Run a part; how it failed, "" where it did not."""
    multicast_off = {"NCCL_NVLS_ENABLE": "0"}  # where the environment does not say
    job = subprocess.Popen(command, cwd=ROOT, env=multicast_off | environment())
    try:
        code = job.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S:.0f} s"
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun ends its ranks, and kills them after 30 s
            job.wait()
    return f"exit code {code}" if code else ""
