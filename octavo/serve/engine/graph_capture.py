"""What captures of CUDA graphs share: a stream, a memory pool, and care for what a capture must not meet."""

import contextlib
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.models import Decoder
from octavo.nn import captured_with_codes, live_tensors, pin_codes
from octavo.ops.registry import implementation_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K")
S = TypeVar("S")

_ATEN = torch.ops.aten
_PUTS = (_ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)
_OPS_THAT_WAIT = (
    *(_ATEN._local_scalar_dense, _ATEN.equal, _ATEN.is_nonzero, _ATEN.allclose, _ATEN.nonzero, _ATEN.masked_select),
    *(_ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive, _ATEN.bincount, _ATEN.histc, _ATEN.multinomial),
)
_KINDS = {torch.float32: "<f4", torch.int64: "<i8", torch.bfloat16: "<i2", torch.float16: "<f2"}


class GraphRecorder:
    """Records CUDA graphs whose results are used before any of them is replayed again: they share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    def clear(self) -> None:
        """Take other memory from now on, so that what earlier graphs held is freed with them."""
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Within, graphs may be recorded, and what they record may be tried on their stream.

        What comes behind waits for it, also where it failed: what was tried may still be about to read its inputs,
        whose memory goes to others then, and would write into the cache wherever these say.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), captured_with_codes(), _no_collection():
                yield
        finally:
            current.wait_stream(self._stream)

    def begin(self) -> None:
        """Begin a graph."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> torch.cuda.CUDAGraph:
        """End the graph that was begun."""
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph was begun"
        graph.capture_end()
        return graph

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Begin a graph; within, end() ends it and begin() begins another. What fails leaves none open."""
        self.begin()
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what failed first is what is raised
                self._give_up()
            raise

    def _give_up(self) -> None:
        """End a graph whose recording has failed.

        torch ends an invalid one halfway: its allocator goes on to ask the graph, which is gone, for whom it records,
        and its generator takes every later draw for a recorded one, until another graph has been recorded.
        """
        graph = self._graph
        if graph is None:
            return
        try:
            self.end()
        except RuntimeError:
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            self.begin()
            torch.zeros((), device=self._device)
            self.end()

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """One graph of a call, and what the call returned."""
        with self.recording():
            out = run()
            return self.end(), out


class CapturedSteps(ABC, Generic[K, S]):
    """Steps of a model as CUDA graphs, by what tells them apart, captured as they are needed.

    Args:
        model: what is captured.

    Attributes:
        what: a warning's beginning: what goes on without them where none can be captured.
        addresses: of the weights that the graphs read; see operand_addresses.
        obstacle: why nothing can be captured, or None.
    """

    what: str

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.addresses: list[int] = []
        self.obstacle: str | None = None
        self._captured: dict[K, S] = {}
        self._recorder = GraphRecorder(model.device)

    @property
    def is_empty(self) -> bool:
        return not self._captured

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._captured.clear()
        self._recorder.clear()

    def _get(self, key: K) -> S | None:
        """The step, captured if need be; None where none can be."""
        if key not in self._captured and self.obstacle is None:
            try:
                if self.is_empty:
                    self.addresses = operand_addresses(self.model)
                self._captured[key] = self._capture(key)
            except RuntimeError as error:
                self.obstacle = str(error).splitlines()[0]
                logger.warning("%s without CUDA graphs, this model waits for the host: %s", self.what, self.obstacle)
        return self._captured.get(key)

    @abstractmethod
    def _capture(self, key: K) -> S: ...


def operand_addresses(model: Decoder) -> list[int]:
    """Where the tensors are that a forward reads; codes of new weights are made where those of the old ones were."""
    pin_codes(model)
    return [x.data_ptr() for x in live_tensors(model).values()]


def borrow(x: torch.Tensor) -> torch.Tensor:
    """x without a claim to its memory, which a graph's pool keeps."""
    held = torch.as_tensor(_Memory(x.contiguous()), device=x.device)
    return held if held.dtype == x.dtype else held.view(x.dtype)


def try_out(run: Callable[[], object]) -> None:
    """Run what is to be captured, outside of a graph: it compiles, loads and checks what it does once.

    Raises:
        RuntimeError: it waits for the device, each time.
    """
    try:
        with NoWaiting():
            run()
    except RuntimeError:
        run()  # what was waited for may have been a check that is made once
        with NoWaiting():
            run()


class NoWaiting(TorchDispatchMode):
    """Within, what this thread would wait for a GPU with raises RuntimeError: a capture would fail on it, for good.

    torch's own check (set_sync_debug_mode) is the process's: it would stop a learner that waits in another thread.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func.overloadpacket, args, kwargs):
            raise RuntimeError(f"{func} waits for the GPU")
        ours = implementation_of(func, args[0]) if args else None
        with self:  # which torch has turned off here; what an op is made of goes through it, too
            made = func.decompose(*args, **kwargs) if ours is None else ours(*args, **kwargs)
        return func(*args, **kwargs) if made is NotImplemented else made


def _waits(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation ends with what only the device knows, or with a copy that does not go by itself."""
    if not (args and isinstance(args[0], torch.Tensor)):
        return False
    if op in (_ATEN._to_copy, _ATEN.copy_):
        moved: torch.Tensor = args[1] if op is _ATEN.copy_ else args[0]
        to = args[0].device if op is _ATEN.copy_ else torch.device(kwargs.get("device") or moved.device)
        is_free = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return to.type != moved.device.type and not is_free
    if args[0].device.type == "cpu":
        return False
    if op is _ATEN.index or op in _PUTS:
        is_fill = op in _PUTS and args[2].numel() == 1 and not any(args[3:4])  # whatever the mask, no place is counted
        masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return (masks and not is_fill) or any(x is not None and x.device != args[0].device for x in args[1])
    if op is _ATEN.repeat_interleave:
        return isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None
    return op in _OPS_THAT_WAIT


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector stays out: what it frees during a capture could be a CUDA call."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Memory:
    """The address of a tensor, for one that does not own it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape), "typestr": _KINDS[x.dtype], "data": (x.data_ptr(), False), "version": 3,
        }  # fmt: skip
