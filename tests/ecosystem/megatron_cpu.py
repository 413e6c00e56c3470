"""Shims that let Megatron-Core run without a GPU, for tests alone; as a script, they come before another script's code.

Megatron asks torch.cuda for the current device, keeps CUDA's random states, and writes device="cuda" in its code.
"""

import contextlib
import functools
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode


class _CudaIsTheCpu(TorchFunctionMode):
    """What asks for a CUDA device gets the CPU, and a tensor's type has the name of CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "cuda" in str(kwargs.get("device", "")):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def without_cuda() -> None:
    """Install the shims in this process, for good."""
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = torch.set_rng_state  # type: ignore[assignment]
    _CudaIsTheCpu().__enter__()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # the router of 0.16.1 names it without TransformerEngine too
        moe_utils.te_general_gemm = None


def training_without_cuda() -> None:
    """Shims for Megatron-LM's own scripts, from a checkout."""
    from megatron.core import tensor_parallel
    from megatron.training import initialize, training

    torch.cuda.device_count = lambda: 8  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9)  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment, misc]
    for name in ("Stream", "Event", "current_stream"):
        setattr(torch.cuda, name, MagicMock())
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_, **__: None
    initialize._compile_dependencies = lambda: None  # kernels for CUDA
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(sys.argv[1]).parent))  # as for a script; Megatron-LM's checkout comes first
    without_cuda()
    if Path(sys.argv[1]).name == "pretrain_gpt.py":
        training_without_cuda()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
