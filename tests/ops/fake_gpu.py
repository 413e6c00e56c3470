"""Launches on CPU tensors that say they are on a GPU: recorded, by triton and directly, in place of done."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo.ops._runtime.launch import triton as launch

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
        self.compiled.module, self.compiled.function, self.compiled.packed_metadata = object(), 17, b"packed"
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
