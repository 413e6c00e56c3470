"""Whether this machine can run octavo: versions, the GPU, memory, Triton's compiler, its cache, optional packages."""

import dataclasses
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from octavo import __version__, env
from octavo.numerics.quantized import quantize_reference
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize_both
from octavo.run.busy_cpu import threads_advice

Status = Literal["ok", "note", "fail"]
# package -> what is missing without it
OPTIONAL = {
    "transformers": "Hugging Face models beside octavo's own",
    "matplotlib": "plots",
    "tensorboard": "event files of training runs",
    "fastapi": "the HTTP server",
    "nvidia-ml-py": "joules a step in octavo bench",
}
_TIMEOUT_S = 20


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding: "ok", "note" (works, and worth knowing) or "fail", which text then says how to fix it."""

    name: str
    status: Status
    text: str


def check_machine(device: torch.device) -> list[Check]:
    """Everything but the recipes, for the device that octavo would compute on."""
    checks = [
        Check("octavo", "ok", f"{__version__} on Python {platform.python_version()}, {platform.system()}"),
        _check_torch(),
        *(_check_gpu(device) if device.type == "cuda" else [_check_cpu()]),
        _check_triton(device),
        _check_cache(env.triton_cache_dir()),
    ]
    if env.force_reference():
        checks.append(Check("reference", "note", "OCTAVO_FORCE_REFERENCE is set: no Triton kernel runs"))
    return [*checks, _check_optional()]


def _check_torch() -> Check:
    built = f"torch {torch.__version__}, built with CUDA {torch.version.cuda or 'none'}"
    if not hasattr(F, "scaled_mm"):
        return Check("torch", "fail", f"{built}: it has no torch.nn.functional.scaled_mm; install torch 2.11 or later")
    return Check("torch", "ok", built)


def _check_gpu(device: torch.device) -> list[Check]:
    name = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    capability = Check("GPU", "ok", f"{name}, compute capability {major}.{minor}")
    if (major, minor) != (9, 0):
        capability = Check("GPU", "note", f"{capability.text}; octavo's kernels are tuned and measured on 9.0 (Hopper)")
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    crowded = free < total / 2
    return [
        capability,
        Check("driver", "ok", _driver_version()),
        Check(
            "GPU memory", "note" if crowded else "ok", memory + ("; another process holds the rest" if crowded else "")
        ),
    ]


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "in use, its version unknown (there is no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else f"unknown: {done.stderr.strip()}"


def _check_cpu() -> Check:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 if hasattr(os, "sysconf") else 0.0
    text = f"{os.cpu_count()} cores, {torch.get_num_threads()} used, {memory:.1f} GiB; FP8 is emulated"
    if torch.version.cuda and not torch.cuda.is_available():
        return Check("CPU", "note", f"{text}. torch is built for CUDA and finds no GPU: look at the driver")
    advice = threads_advice(torch.device("cpu"))
    return Check("CPU", "note", f"{text}; {advice}") if advice else Check("CPU", "ok", text)


def _check_triton(device: torch.device) -> Check:
    """On a GPU the quantizer is compiled, run and compared bit by bit; without one it is compiled for Hopper."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        if device.type == "cuda":
            return Check("triton", "fail", "not installed, and a GPU needs its kernels; install triton")
        return Check("triton", "note", "not installed, and a CPU needs none")
    try:
        done = _run_kernel(device) if device.type == "cuda" else _compile_kernel()
    except Exception as error:  # whatever a compiler, an assembler or a driver may raise is the finding
        text = f"{found}: no kernel compiles: {describe(error)}"
        return Check("triton", "fail" if device.type == "cuda" else "note", text)
    return Check("triton", "ok", f"{found}, {done}")


def _run_kernel(device: torch.device) -> str:
    x, scaling = torch.randn(256, 256).bfloat16(), Scaling.block_1x128()
    rows, columns = quantize_both(x.to(device), scaling)
    for got, source in ((rows, x), (columns, x.t().contiguous())):
        expected = quantize_reference(source, scaling)
        if not torch.equal(got.qdata.cpu().view(torch.uint8), expected.qdata.view(torch.uint8)):
            raise RuntimeError("the quantizer's codes differ from the reference")
    return "a quantizer compiles and gives the reference's bits"


def _compile_kernel() -> str:
    from octavo.ops.quantize import triton  # where it is not installed nothing but this check may ask for it
    from octavo.testing.compile import record_launches

    scaling = Scaling.block_1x128()
    with record_launches() as launches:
        triton.quantize_matrix(torch.zeros(256, 256, dtype=torch.bfloat16), scaling, scaling)
    registers = max(launch.compile().registers for launch in launches)
    return f"compiles for Hopper without a GPU ({registers} registers)"


def _check_cache(path: Path) -> Check:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        return Check("kernel cache", "fail", f"{path} cannot be written ({reason}); set TRITON_CACHE_DIR")
    return Check("kernel cache", "ok", f"{path} can be written")


def _check_optional() -> Check:
    missing = [f"{name} ({purpose})" for name, purpose in OPTIONAL.items() if not _is_installed(name)]
    if missing:
        return Check("optional packages", "note", f"not installed: {', '.join(missing)}")
    return Check("optional packages", "ok", ", ".join(OPTIONAL))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def describe(error: Exception) -> str:
    """An error in one line: a compiler's first line says where, its last one what."""
    lines = str(error).strip().splitlines() or ["no message"]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"
    return f"{type(error).__name__}: {text}"
