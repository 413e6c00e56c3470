"""What captures of CUDA graphs share: a stream, a memory pool, and care for what a capture must not meet."""

import contextlib
import gc
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from octavo.models import Decoder
from octavo.nn import captured_with_codes, live_tensors, pin_codes

# steps that may take a larger one's graph before a capture of their own, some tenths of a second, is worth it
COVERED_STEPS = 256
# what captures leave of the GPU's memory: at its end torch would give away what it keeps for the largest steps
LEAST_FREE_BYTES = 128 << 20

logger = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K")
S = TypeVar("S")

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
        graph = self._graph
        assert graph is not None, "no graph was begun"
        graph.capture_end()
        self._graph = None
        return graph

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Begin a graph; within, end() ends it and begin() begins another. What fails leaves none open."""
        try:
            self.begin()
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what failed first is what is raised
                self._give_up()
            raise

    def _give_up(self) -> None:
        """End a graph whose recording, beginning or end has failed.

        torch ends an invalid one halfway: its allocator goes on to ask the graph, which is gone, for whom it records,
        and its generator takes every later draw for a recorded one, until another graph has been recorded. A pool that
        a graph takes with it is not begun with again.
        """
        if self._graph is not None:
            with contextlib.suppress(RuntimeError):
                self.end()
                self.clear()
                return
        self._graph = None
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(RuntimeError):  # it may not have begun to record
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self.clear()
        self.begin()
        torch.zeros((), device=self._device)
        self.end()
        self.clear()

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
        instead: what steps without one do, in that warning.
        addresses: of the weights that the graphs read; see operand_addresses.
        obstacle: why nothing more can be captured, or None.
    """

    what: str
    instead = "wait for the host"
    _lacks_memory = False

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.addresses: list[int] = []
        self.obstacle: str | None = None
        self._captured: dict[K, S] = {}
        self._num_covered: Counter[K] = Counter()
        self._recorder = GraphRecorder(model.device)

    @property
    def is_empty(self) -> bool:
        return not self._captured

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._captured.clear()
        self._recorder.clear()
        if self._lacks_memory:  # which is free now
            self.obstacle, self._lacks_memory = None, False

    def _get(self, key: K) -> S | None:
        """The step, captured if need be; None where none can be, on no rank of a model that is cut."""
        if key not in self._captured and self.obstacle is None:
            self._try(key)
            if (group := self.model.tensor_group) is not None:  # a graph may send other messages than a step without
                self.obstacle = next(filter(None, group.together(lambda: self.obstacle)), None)
            if self.obstacle is not None:
                self._captured.pop(key, None)
                self._warn(self.obstacle)
        return self._captured.get(key)

    def _find(self, key: K) -> S | None:
        """The step, or a larger one that holds it, until it has come often; else as _get."""
        found = self._captured.get(key)
        cover = None if found is not None else self._cover(key)
        if cover is None:
            return self._get(key) if found is None else found
        self._num_covered[key] += 1
        own = self._get(key) if self._num_covered[key] > COVERED_STEPS else None
        return self._captured[cover] if own is None else own

    @abstractmethod
    def _cover(self, key: K) -> K | None:
        """A captured step that holds this one and is not much larger."""

    def _try(self, key: K) -> None:
        try:
            if (free := _free_bytes(self.model)) < LEAST_FREE_BYTES:
                raise torch.OutOfMemoryError(f"nearly out of memory: {free >> 20} MiB are free")
            if self.is_empty:
                self.addresses = operand_addresses(self.model)
            self._captured[key] = self._capture(key)
        except RuntimeError as error:
            self.obstacle = str(error).splitlines()[0]

    def _warn(self, obstacle: str) -> None:
        """Say once what goes on without graphs; those that are captured stay."""
        self._lacks_memory = "out of memory" in obstacle
        if not self._captured and not self._lacks_memory:
            logger.warning("%s without CUDA graphs, and such steps %s: %s", self.what, self.instead, obstacle)
            return
        remedy = "; lower gpu_memory_utilization or max_num_seqs" if self._lacks_memory else ""
        num = len(self._captured)
        text = "%s with %d CUDA graphs, and steps of other sizes %s: %s%s"
        logger.warning(text, self.what, num, self.instead, obstacle, remedy)

    def _prepare(self, key: K) -> bool:
        """Capture a step and run it once, over padding alone: a GPU takes in a graph when it first runs.

        Returns:
            False where it cannot be captured.
        """
        step = self._get(key)
        if step is not None:
            self._run_once(step)
        return step is not None

    @abstractmethod
    def _capture(self, key: K) -> S: ...

    @abstractmethod
    def _run_once(self, step: S) -> None: ...


def _free_bytes(model: Decoder) -> int:
    """Of the GPU's memory; where ranks compute together, on the one with the least, for all of them capture or none."""
    is_gpu = model.device.type == "cuda"
    free: int = torch.cuda.mem_get_info(model.device)[0] if is_gpu else LEAST_FREE_BYTES
    return free if model.tensor_group is None else model.tensor_group.smallest(free)


def operand_addresses(model: Decoder) -> list[int]:
    """Where the tensors are that a forward reads; codes of new weights are made where those of the old ones were."""
    pin_codes(model)
    return [x.data_ptr() for x in live_tensors(model).values()]


def borrow(x: torch.Tensor) -> torch.Tensor:
    """x without a claim to its memory, which a graph's pool keeps."""
    held = torch.as_tensor(_Memory(x.contiguous()), device=x.device)
    return held if held.dtype == x.dtype else held.view(x.dtype)


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
