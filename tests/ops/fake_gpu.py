"""Launches on CPU tensors that say they are on a GPU: recorded, or named and compiled, in place of done."""

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo.ops._runtime.kernel_requests.triton import KernelRequest, requesting_kernels
from octavo.ops._runtime.launch import triton as launch
from octavo.ops.norm import triton as norms

STREAM = 99
TARGET = ("cuda", 90, 32)


class FakeGpu:
    """What was launched; `device` is what a tensor's memory is said to be of, `compiled` what triton gives back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.device, self.stack = 0, monkeypatch
        self.compiled: Any = object.__new__(CompiledKernel)
        self.compiled._run = lambda *values: self.direct.append(values)
        self.compiled.module, self.compiled.function, self.compiled.packed_metadata = None, 17, b"packed"
        self.compiled.metadata = types.SimpleNamespace(target=GPUTarget("cuda", 90, 32))

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **fixed: Any) -> Any:
            self.by_triton.append((grid, args, fixed))
            return self.compiled

        monkeypatch.setattr(JITFunction, "run", run)
        monkeypatch.setattr(launch, "_TRITON_RUN", run)
        monkeypatch.setattr(launch, "current_device", lambda: 0)
        monkeypatch.setattr(launch, "current_stream", lambda device: STREAM)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: self.device)

    def clear(self) -> None:
        self.by_triton, self.direct = [], []


class FakeDriver:
    """Triton's driver of a Hopper GPU that a kernel never reaches: to launch one is an AttributeError."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take triton's place; compiled kernels go to the folder."""
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        monkeypatch.setattr(knobs.cache, "manager_class", None)
        monkeypatch.setattr(launch, "current_device", lambda: 0)
        monkeypatch.setattr(driver, "_active", self)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(*TARGET)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM


X = torch.zeros(16, 256, dtype=torch.bfloat16)


@contextlib.contextmanager
def hopper(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A FakeDriver, for which norms are launched for the first time."""
    FakeDriver(cache, monkeypatch)
    launched = norms.norm_rows, norms.norm_backward_rows, norms.sum_partials
    for kernel in launched:
        kernel.device_caches.clear()
    yield
    for kernel in launched:
        kernel.device_caches.clear()


def launch_norm(x: torch.Tensor = X) -> torch.Tensor:
    """One launch; what it wrote."""
    return norms.norm_forward(x, x[0], None, None, 1e-5, "rms_norm", False)[0]


def requests_of(*steps: Callable[[], object]) -> list[KernelRequest]:
    """What steps ask for."""
    found: list[KernelRequest] = []
    with requesting_kernels(found.append):
        for step in steps:
            step()
    return found
