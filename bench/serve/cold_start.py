"""Seconds from the start of a process to its first token: checkpoint in the page cache, with and without kernels."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.serve.shapes import build_model
from bench.serve.workloads import MAX_NUM_SEQS, MEMORY_SHARE, EngineVariant
from octavo import env
from octavo.errors import BackendError
from octavo.models import ModelConfig, save_model
from octavo.numerics import Numerics

_CHUNK_BYTES = 64 << 20
_PROMPT_LEN = 128


@dataclasses.dataclass(frozen=True)
class ColdStart:
    """seconds in all; of these to load the checkpoint and make the engine, and of the request itself.

    load_peak_bytes: the most of the GPU's memory that loading the weights took, 0 on a CPU.
    bf16_bytes: what the weights take in bf16.
    """

    seconds: float
    load_s: float
    request_s: float
    load_peak_bytes: int
    bf16_bytes: int

    @property
    def start_s(self) -> float:
        """The rest: the interpreter's start and the imports, torch's mostly."""
        return self.seconds - self.load_s - self.request_s

    @property
    def complaint(self) -> str | None:
        """What is wrong with the memory: weights are quantized while they are read, so it never exceeds theirs."""
        if self.load_peak_bytes <= self.bf16_bytes:
            return None
        peak, weights = self.load_peak_bytes / 2**30, self.bf16_bytes / 2**30
        return f"loading took up to {peak:.2f} GiB, more than the {weights:.2f} of the weights in bf16"


@contextlib.contextmanager
def checkpoint_of(config: ModelConfig, device: str, given: Path | None) -> Iterator[Path]:
    """A bf16 checkpoint in the page cache: the one that was given, or one of random weights that is removed again."""
    with tempfile.TemporaryDirectory() as folder:
        path = given
        if path is None:
            path = Path(folder, "checkpoint")
            save_model(build_model(config, Numerics(), device), path)
        for file in sorted(path.glob("*.safetensors")):
            _read_through(file)
        yield path


def measure_cold_start(
    path: Path, variant: EngineVariant, recipe: str, device: str, caches: Path, *, timeout_s: float, quick: bool
) -> ColdStart:
    """Start a process that loads the checkpoint and generates one token.

    Args:
        caches: folder of compiled kernels; empty for a machine that has never run the model.
    Raises:
        BackendError: it failed, or it took longer than timeout_s.
    """
    fields = process_fields(path, variant, recipe, device, quick=quick)
    command = [sys.executable, "-m", "bench.serve.first_token", json.dumps(fields)]
    began = time.perf_counter()
    line = first_line_of(command, caches, timeout_s)
    seconds = time.perf_counter() - began
    stages = json.loads(line)
    if stages.pop("num_tokens") != 1:
        raise BackendError(f"the cold process made no token: {line}")
    return ColdStart(seconds, **stages)


def process_fields(path: Path, variant: EngineVariant, recipe: str, device: str, *, quick: bool) -> dict[str, Any]:
    """What bench.serve.first_token is told."""
    limits: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "gpu_memory_utilization": MEMORY_SHARE}
    if quick:
        limits = {"max_num_seqs": 4, "num_kv_pages": 16, "max_model_len": 256}
    limits["warm_up"] = False  # a single token needs no CUDA graph
    return {
        "path": str(path),
        "recipe": variant.recipe_name(recipe),
        "kv_cache_dtype": variant.kv_cache_dtype,
        "exact": variant.exact,
        "device": device,
        "prompt_ids": list(range(1, _PROMPT_LEN + 1)),
        "limits": limits,
    }


def first_line_of(command: list[str], caches: Path, timeout_s: float) -> str:
    """What a fresh process prints first; its compiled kernels go to the folder `caches`. It is killed then.

    Raises:
        BackendError: it ended without a line, or timeout_s came before.
    """
    folders = {name: str(caches / name) for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
    with subprocess.Popen(command, env=env.child_environment(**folders), stdout=subprocess.PIPE, text=True) as process:
        try:
            return _first_line(process, timeout_s)
        finally:
            process.kill()  # what it still does is its end, no part of what was measured


def _first_line(process: "subprocess.Popen[str]", timeout_s: float) -> str:
    assert process.stdout is not None, "it was asked for"
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if not line:
        raise BackendError(f"the fresh process ended with {process.wait()} and without a line; its errors stand above")
    return line


def _read_through(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK_BYTES):
            pass
