"""Triton kernels that steps ask for: named while the steps run without them, compiled in worker processes.

Compiling in threads is held up by Python's lock. Here a thread runs the steps with every launch left out whose kernel
is not on disk, which takes a second, and processes compile all that was left out at once, into Triton's cache on disk.
"""

import contextlib
import hashlib
import importlib
import json
import pkgutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from triton import __version__, knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_source
from triton.runtime import jit
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.driver import driver

from octavo.ops._runtime.kernel_cache.triton import use_checked_cache
from octavo.ops._runtime.kernel_requests import leaves_out_launches, leaving_out_launches
from octavo.ops._runtime.launch.triton import settle_key

_EMPTY = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
)


class KernelRequest(NamedTuple):
    """A kernel as Triton specializes it for a launch: all that another process of this installation compiles it by.

    module, name: where the triton.jit function is.
    signature, constants, attributes: of triton.compiler.ASTSource.
    options: such as num_warps.
    target: of triton.backends.compiler.GPUTarget.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: tuple[str, int, int]

    def source(self) -> ASTSource:
        """What Triton compiles."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        settle_key(kernel)
        return ASTSource(kernel, self.signature, self.constants, self.attributes)

    def entry(self) -> "CacheEntry":
        """Where Triton keeps it."""
        source, backend = self.source(), make_backend(GPUTarget(*self.target))
        options = backend.parse_options(self.options | source.parse_options())
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        return CacheEntry(hashlib.sha256(key.encode()).hexdigest(), f"{source.name[:150]}.json")


class CacheEntry(NamedTuple):
    """A kernel in Triton's cache on disk."""

    key: str
    file: str

    def is_there(self) -> bool:
        """Whether Triton will find it."""
        return self.file in (get_cache_manager(self.key).get_group(self.file) or {})


def compiler_version() -> str:
    """What a kernel's place in the cache depends on beside the kernel and the GPU."""
    return f"triton {__version__} {sorted(get_cache_invalidating_env_vars().items())}"


@contextlib.contextmanager
def requesting_kernels(take: Callable[[KernelRequest], None]) -> Iterator[set[CacheEntry]]:
    """Let this thread launch no kernel that would have to be compiled: it is named to take() instead, once.

    New tensors hold zeros, for what such a kernel would have written is read by what does run. Other threads launch as
    ever. Where a jit_cache_hook is set already, nothing is left out.

    Yields:
        The kernels that the thread met, those that were on disk too.
    """
    entries = set[CacheEntry]()
    if knobs.runtime.jit_cache_hook is not None:
        yield entries
        return
    asked = set[str]()

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002: Triton's name
        if not leaves_out_launches():
            return False  # of another thread
        request = _request_of(fn.jit_function, compile)
        if (what := f"{request.module} {request.name} {key}") in asked:
            return True
        entries.add(entry := request.entry())
        if entry.is_there():
            return False
        asked.add(what)
        take(request)
        return True

    serialize = jit.serialize_specialization_data
    knobs.runtime.jit_cache_hook = hook
    jit.serialize_specialization_data = _serialize_options  # Triton's own fails on a tuple that holds a dtype
    try:
        with leaving_out_launches(), _ZerosForEmpty():
            yield entries
    finally:
        knobs.runtime.jit_cache_hook = None
        jit.serialize_specialization_data = serialize


def _serialize_options(_name: str, _signature: Any, _constants: Any, _attrs: Any, options: Any, *_: Any) -> str:
    """What _request_of reads of a launch; a hook is told the rest as it is."""
    return json.dumps({"options": options.__dict__})


def _request_of(kernel: Any, told: dict[str, Any]) -> KernelRequest:
    options = json.loads(told["specialization_data"])["options"]
    target = driver.active.get_current_target()
    return KernelRequest(
        kernel.fn.__module__,
        kernel.fn.__qualname__,
        told["signature"],
        told["constants"],
        told["configs"][0],
        {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        (target.backend, target.arch, target.warp_size),
    )


class _ZerosForEmpty(TorchFunctionMode):
    """Memory that a call of this thread leaves as it is, filled with zeros.

    No TorchDispatchMode: octavo's ops would go through the dispatcher, and torch loads its compiler for a mode's first
    operation, which takes seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


class _NoGpu:
    """Triton's driver in a process that compiles for a GPU and has none."""

    def __init__(self, target: tuple[str, int, int]) -> None:
        self._target = GPUTarget(*target)

    def get_current_target(self) -> GPUTarget:
        """What kernels ask for as they are compiled."""
        return self._target


def load_kernels(target: tuple[str, int, int]) -> None:
    """Load every kernel of octavo in a process that only compiles: what it forks need not."""
    driver.set_active(_NoGpu(target))
    use_checked_cache()
    with preparing_triton():
        ops = importlib.import_module("octavo.ops")
        for found in pkgutil.walk_packages(ops.__path__, "octavo.ops."):
            if found.name.endswith(".triton"):
                importlib.import_module(found.name)
        make_backend(GPUTarget(*target)).hash()  # asks the assembler for its version, once


@contextlib.contextmanager
def preparing_triton() -> Iterator[None]:
    """Let Triton do beside what is done within what it does once a process, which takes half a second.

    It hashes itself, 400 MB, for kernels' names on disk, and makes its driver, by a C compiler where none is on disk.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="octavo-triton") as pool:
        hashing, driving = pool.submit(triton_key), pool.submit(lambda: driver.active)
        yield
    hashing.result()
    driving.result()


def compile_kernel(request: KernelRequest) -> float:
    """Compile it and what launches it into the cache on disk; seconds that it took. Raises what Triton does."""
    began = time.perf_counter()
    kernel = compile_source(request.source(), target=GPUTarget(*request.target), options=request.options)
    if hasattr(nvidia, "make_launcher"):  # Triton 3.6 runs a C compiler for each signature, else at the first launch
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    return time.perf_counter() - began
