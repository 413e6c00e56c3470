"""Launching a Triton kernel in a few microseconds of CPU time; triton's own way takes as long as a small kernel runs.

At every launch triton binds the arguments, works out what it specializes on, and looks a kernel up by a text made of
all that. A `Launcher` lets it do so once for each key and then calls the compiled kernel itself.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# Versions whose CompiledKernel.run was read: (x, y, z, stream, function, packed metadata, launch metadata, enter hook,
# exit hook, *all parameters, constants included), with an address wherever the kernel takes a pointer.
KNOWN_VERSIONS = ("3.6.", "3.7.")
IS_KNOWN_VERSION = triton.__version__.startswith(KNOWN_VERSIONS)
IS_COMPILED = tl.constexpr(not knobs.runtime.interpret)
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_NO_CHANGE = contextlib.nullcontext()
# torch.cuda.current_device without its look whether CUDA has started: here a tensor is on a GPU already.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_TRITON_RUN = JITFunction.run  # whoever replaces it, as octavo.testing.compile does, wants to see every launch


@triton.jit
def let_next_begin():
    """In a small kernel: let one that is launched early (launch_pdl) begin what does not depend on this kernel."""
    if IS_COMPILED and cuda_capability_geq(9):
        gdc_launch_dependents()


class Prepared(NamedTuple):
    """What a launch needs of a CompiledKernel, and the constants that it was compiled with."""

    run: Any
    function: int
    metadata: Any
    constants: tuple[Any, ...]

    def launch(self, grid: tuple[int, int, int], stream: int, *values: Any) -> None:
        """Launch on a stream of the device that this was prepared on; values are addresses in the place of tensors."""
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *values, *self.constants)


class Launcher:
    """A kernel with its constants and options: Launcher(kernel, **fixed)(grid, *args) is kernel[grid](*args, **fixed).

    The compiled kernel is kept for all that triton specializes on: the device, of a tensor its dtype, device and
    whether its address is a multiple of 16, of a descriptor its tensor's dtype and its block, of a whole number whether
    it is 1 or a multiple of 16, what is None, and all of it inside tuples. Triton launches itself whatever this does
    not know: an interpreter, hooks, debugging, another version or backend, arguments of other types, numbers of more
    than 32 bits, tensors off the GPU.

    Args:
        kernel: a triton.jit function whose last parameters are the constants.
        fixed: those constants by name, and options such as num_warps.
    """

    __slots__ = ("_constants", "_fixed", "_kept", "_kernel")

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        names = kernel.arg_names
        self._constants = tuple(fixed[name] for name in names if name in fixed)
        last = names[len(names) - len(self._constants) :]
        assert all(name in fixed for name in last), f"the constants of {kernel} are not its last parameters: {names}"
        self._kernel, self._fixed = kernel, fixed
        self._kept: dict[tuple[Any, ...], Prepared] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> Prepared | None:
        """Launch on the current device and its current stream.

        Returns:
            What launches all arguments of this key, for a caller who knows his to be such and asks is_unobserved each
            time; None where triton launches them.
        """
        key: list[Any] = []
        values: list[Any] = []
        if not (_describe(args, key, values) and is_unobserved(self._kernel)):
            self._kernel[grid](*args, **self._fixed)
            return None
        device: int = _current_device()
        key.append(device)
        kept_as = tuple(key)
        prepared = self._kept.get(kept_as)
        if prepared is None:
            return self._keep(kept_as, self._kernel[grid](*args, **self._fixed))
        prepared.launch(whole_grid(grid), current_stream(device), *values)
        return prepared

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> Prepared | None:
        """Keep what triton has just launched for this key."""
        if not (isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda"):
            return None
        prepared = Prepared(compiled.run, compiled.function, compiled.packed_metadata, self._constants)
        self._kept[key] = prepared
        return prepared


def whole_grid(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """A grid of one, two or three numbers as three."""
    return (*grid, 1, 1)[:3]  # type: ignore[return-value]


@functools.lru_cache(maxsize=1024)
def launcher_of(kernel: Any, **fixed: Any) -> Launcher:
    """The one Launcher of a kernel with these constants and options; finding it takes some 2 us."""
    return Launcher(kernel, **fixed)


def _describe(args: tuple[Any, ...], key: list[Any], values: list[Any]) -> bool:
    """Add what triton specializes on to key, and the arguments with addresses for tensors to values.

    Returns:
        False for what has no key: a CPU's memory, which triton refuses, wide numbers, types that are not listed.
    """
    for arg in args:
        kind = type(arg)
        if arg is None:
            key.append(None)
            values.append(None)
        elif kind in _TENSOR_TYPES:
            device = arg.get_device()
            if device < 0:
                return False
            address = arg.data_ptr()
            key += (arg.dtype, device, address % 16 == 0)
            values.append(address)
        elif kind is int:
            if not -(2**31) <= arg < 2**31:
                return False
            key.append(1 if arg == 1 else 16 if arg % 16 == 0 else 0)
            values.append(arg)
        elif kind is float or kind is bool:  # triton specializes on their types alone
            key.append(kind)
            values.append(arg)
        elif kind is tuple:
            key += (tuple, len(arg))
            inner: list[Any] = []
            if not _describe(arg, key, inner):
                return False
            values.append(tuple(inner))
        elif kind is TensorDescriptor:  # triton's launcher makes of it what the tensor memory unit takes
            key += (TensorDescriptor, arg.base.dtype, arg.base.get_device(), *arg.block_shape)
            values.append(arg)
        else:
            return False
    return True


def kind_of(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What triton specializes on of a tensor or None, for callers who keep what Launcher returns."""
    return None if tensor is None else (tensor.dtype, tensor.get_device(), tensor.data_ptr() % 16 == 0)


def is_unobserved(kernel: Any) -> bool:
    """Whether nobody asked triton to show, change or check launches, in the ways that these versions of it have."""
    runtime = knobs.runtime
    return (
        IS_KNOWN_VERSION
        and isinstance(kernel, JITFunction)
        and JITFunction.run is _TRITON_RUN
        and not kernel.pre_run_hooks
        and not runtime.debug
        and not knobs.compilation.instrumentation_mode
        and runtime.add_stages_inspection_hook is None
        # None, a chain of functions, or one function, which has no calls
        and not getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        and not getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )


def current_stream(device: int) -> int:
    """The handle of a device's current stream."""
    return driver.active.get_current_stream(device)  # type: ignore[no-any-return]


def is_current_gpu(device: torch.device) -> bool:
    """Whether it is the GPU on which kernels are launched."""
    return device.type == "cuda" and device.index == _current_device()


def is_on_current_device(x: torch.Tensor) -> bool:
    """Whether x is on the GPU on which kernels are launched, or on none."""
    return not x.is_cuda or x.get_device() == _current_device()


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The context in which a kernel that works on x is launched."""
    return _NO_CHANGE if is_on_current_device(x) else torch.cuda.device(x.device)
