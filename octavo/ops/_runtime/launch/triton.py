"""Launching a Triton kernel in a few microseconds of CPU time; triton's own way takes as long as a small kernel runs.

At every launch triton binds the arguments, works out what it specializes on, and looks a kernel up by a text made of
all that. `launcher_of(kernel, **constants)` lets it do so once for each key and then calls the compiled kernel itself.
"""

import contextlib
import functools
import threading
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver
from triton.runtime.jit import JITCallable, JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# Versions whose CompiledKernel.run was read: (x, y, z, stream, function, packed metadata, launch metadata, enter hook,
# exit hook, *all parameters, constants included), with an address wherever the kernel takes a pointer.
KNOWN_VERSIONS = ("3.6.", "3.7.")
IS_KNOWN_VERSION = triton.__version__.startswith(KNOWN_VERSIONS)
IS_COMPILED = tl.constexpr(not knobs.runtime.interpret)
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_NO_CHANGE = contextlib.nullcontext()
_MOST_KEPT = 4096
# torch.cuda.current_device without its look whether CUDA has started: here a tensor is on a GPU already.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_TRITON_RUN = JITFunction.run  # what replaces it, as octavo.testing.compile does, has to see every launch


@triton.jit
def let_next_begin():
    """In a small kernel: let one that is launched early (launch_pdl) begin what does not depend on this kernel."""
    if IS_COMPILED and cuda_capability_geq(9):
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """In a kernel that was launched early: wait until those before it have ended, and what they wrote is there."""
    if EARLY and IS_COMPILED and cuda_capability_geq(9):
        gdc_wait()


# Rows up to which small kernels are launched early: more fill the GPU by themselves.
EARLY_ROWS = 32


@functools.cache
def can_begin_early(device: torch.device) -> bool:
    """Whether launches on this device may overlap: from Hopper on. Without a GPU, what Hopper would get is compiled."""
    if knobs.runtime.interpret:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


class CompiledLaunch(NamedTuple):
    """What a launch needs of a CompiledKernel, and the constants that it was compiled with."""

    run: Any
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    kernel: CompiledKernel  # triton 3.8 unloads the code of one that goes

    def launch(self, grid: tuple[int, int, int], stream: int, *values: Any) -> None:
        """Launch on a stream of the device that this was compiled for; values are addresses in the place of tensors."""
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *values, *self.constants)


class LaunchCache(dict[Any, Any]):
    """What has been made for launches, by all values that decide it; the oldest of _MOST_KEPT goes when one is added.

    What is dropped is made again by the next launch that asks for it, which takes as long as one by triton.
    """

    _lock = threading.Lock()

    def keep(self, key: Any, made: Any) -> None:
        """Add what was made."""
        with self._lock:
            if len(self) >= _MOST_KEPT:
                del self[next(iter(self))]
            self[key] = made


_settled: dict[Any, bool] = {}  # function -> whether it and all that it calls have been hashed
_settling = threading.RLock()
# (kernel, its constants and options, what triton specializes on, device) -> CompiledLaunch
_compiled = LaunchCache()


class Launcher:
    """A kernel with its constants and options: Launcher(kernel, fixed)(grid, *args) is kernel[grid](*args, **fixed).

    A compiled kernel is kept for all that triton specializes on: the device, of a tensor its dtype, device and
    whether its address is a multiple of 16, of a descriptor its tensor's dtype and its block, of a whole number whether
    it is 1 or a multiple of 16, what is None, and all of it inside tuples. Triton launches itself whatever this does
    not know: an interpreter, hooks, debugging, another version or backend, arguments of other types, numbers of more
    than 32 bits, tensors off the GPU.
    """

    __slots__ = ("_fixed", "_prefix", "kernel")

    def __init__(self, kernel: Any, fixed: dict[str, Any]) -> None:
        self.kernel, self._fixed = kernel, fixed
        self._prefix = (kernel.fn, *fixed, *fixed.values())  # a JITFunction would be hashed by its source

    def __call__(self, grid: tuple[int, ...], *args: Any) -> CompiledLaunch | None:
        """Launch on the current device and its current stream.

        Returns:
            What launches all arguments of this key, for a caller who knows his to be such and asks has_launch_hooks
            each time; None where triton launches them.
        """
        kernel, fixed = self.kernel, self._fixed
        if has_launch_hooks(kernel):
            launch_by_triton(kernel, grid, *args, **fixed)
            return None
        key: list[Any] = [self._prefix]
        values: list[Any] = []
        if not _describe(args, key, values):
            launch_by_triton(kernel, grid, *args, **fixed)
            return None
        device: int = current_device()
        key.append(device)
        kept_as = tuple(key)
        compiled: CompiledLaunch | None = _compiled.get(kept_as)
        if compiled is not None:
            compiled.launch(whole_grid(grid), current_stream(device), *values)
            return compiled
        compiled = self._compiled_launch(launch_by_triton(kernel, grid, *args, **fixed))
        if compiled is not None:
            _compiled.keep(kept_as, compiled)
        return compiled

    def _compiled_launch(self, made: Any) -> CompiledLaunch | None:
        """What triton has just launched, where it can be launched again without it."""
        if not (isinstance(made, CompiledKernel) and made.metadata.target.backend == "cuda"):
            return None
        names = self.kernel.arg_names
        constants = tuple(self._fixed[name] for name in names if name in self._fixed)
        last = names[len(names) - len(constants) :]
        assert all(name in self._fixed for name in last), f"the constants of {self.kernel} are not its last: {names}"
        return CompiledLaunch(made.run, made.function, made.packed_metadata, constants, made)


def launcher_of(kernel: Any, **fixed: Any) -> Launcher:
    """What launches a kernel with these constants and options.

    Args:
        kernel: a triton.jit function whose last parameters are the constants.
        fixed: those constants by name, and options such as num_warps.
    """
    return Launcher(kernel, fixed)


def launch_by_triton(kernel: Any, grid: tuple[int, ...], *args: Any, **fixed: Any) -> Any:
    """kernel[grid](*args, **fixed), found on disk whatever was launched before it: see settle_key."""
    settle_key(kernel)
    return kernel[grid](*args, **fixed)


def settle_key(kernel: Any) -> None:
    """Let Triton hash what a kernel calls before the kernel itself.

    The hash, which the name on disk is made of, holds the constants of a function that is called only if that function
    was hashed before. Without this a process compiles again what another has compiled in another order.
    """
    if not isinstance(kernel, JITCallable) or _settled.get(kernel.fn):
        return
    with _settling:  # another thread shall not launch what is half settled
        if kernel.fn not in _settled:
            _settled[kernel.fn] = False  # it may call itself
            _settle(kernel)
            _settled[kernel.fn] = True


def _settle(kernel: Any) -> None:
    names = kernel.fn.__code__.co_names
    found = [kernel.fn.__globals__.get(name) for name in names]
    modules = [value for value in found if isinstance(value, ModuleType) and not _is_tritons(value)]
    for value in (*found, *(getattr(module, name, None) for module in modules for name in names)):
        settle_key(value)
    _ = kernel.cache_key  # made when it is first asked for


def _is_tritons(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "triton"


def whole_grid(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """A grid of one, two or three numbers as three."""
    return (*grid, 1, 1)[:3]  # type: ignore[return-value]


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


def has_launch_hooks(kernel: Any) -> bool:
    """Whether triton must launch itself: it shows, changes or checks launches, or is another than is known here."""
    runtime = knobs.runtime
    return bool(
        not IS_KNOWN_VERSION
        or not isinstance(kernel, JITFunction)
        or JITFunction.run is not _TRITON_RUN
        or kernel.pre_run_hooks
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook is not None
        # None, a chain of functions, or one function, which has no calls
        or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )


def _current_stream(device: int) -> int:
    return driver.active.get_current_stream(device)


# What triton's driver calls, without the Python around it: the handle of a device's current stream.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def is_current_gpu(device: torch.device) -> bool:
    """Whether it is the GPU on which kernels are launched."""
    return device.type == "cuda" and device.index == current_device()


def is_on_current_device(x: torch.Tensor) -> bool:
    """Whether x is on the GPU on which kernels are launched, or on none."""
    return not x.is_cuda or x.get_device() == current_device()


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The context in which a kernel that works on x is launched."""
    return _NO_CHANGE if is_on_current_device(x) else torch.cuda.device(x.device)
