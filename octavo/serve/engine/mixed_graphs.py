"""CUDA graphs of whole steps with prompts, attention within, for steps of few tokens over sequences of some length.

A graph holds a number of tokens and a bound on the work of single tokens' attention; a step takes the smallest that
fits, filled up with padding. How its tokens are distributed over sequences is read from one vector that each step
sends (mixed_inputs.py), page tables and newest tokens from the slots.
"""

import contextlib
from typing import NamedTuple

import torch

from octavo.models import Decoder
from octavo.ops.attention import (
    PAGE_SIZE,
    MixedBatch,
    PagedKVLayer,
    attention_mixed,
    has_kernel,
    mixed_tile_rows,
)
from octavo.ops.attention.mixed import SPLIT
from octavo.serve.engine.caching_context import PagesContext
from octavo.serve.engine.expert_choices import RoutedExpertsRecorder
from octavo.serve.engine.graph_capture import CapturedSteps, borrow
from octavo.serve.engine.mixed_inputs import MixedInputs, MixedShape, Work, empty_vector, fill_vector
from octavo.serve.engine.prompt_graphs import sizes_for
from octavo.serve.engine.scheduler import Chunk
from octavo.serve.engine.slots import Slots
from octavo.serve.engine.waiting import try_out

MOST_TOKENS = 1024  # of a step; a larger one keeps the GPU busy for longer than the CPU launches its pieces
MOST_LENGTH = 8192  # tokens of a sequence; page tables and splits are as many as these need
# splits of single tokens' keys, by which graphs differ: programs without work take a GPU some time, too
_SPLITS = (256, 1024)
_SPARE_TILES = 64  # beside those of a step's rows: the last one of a sequence may hold few


class MixedStep(NamedTuple):
    """A captured step.

    Attributes:
        shape: what it is filled up to.
        vector: see MixedInputs.
        graph: to the hidden states.
        hidden: [T, hidden_size].
    """

    shape: MixedShape
    vector: torch.Tensor
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


class Planned(NamedTuple):
    """A step that a graph can hold.

    Attributes:
        key: of the smallest graph that has room for its tokens and its tiles: tokens and splits.
        num_tokens: its own.
        work: for attention.
    """

    key: tuple[int, int]
    num_tokens: int
    work: Work


class MixedGraphs(CapturedSteps[tuple[int, int], MixedStep]):
    """Captures graphs for sizes that come a second time, and replays them.

    Args:
        model: what is captured; see can_mix.
        slots: read by the graphs.
        layers: the cache, one entry a layer.
        max_tokens: of a step.
        max_model_len: the engine's.
        choices: where the experts of each token are recorded; None for nowhere.

    Attributes:
        sizes: tokens that steps are filled up to, rising.
        split_sizes: splits, likewise.
    """

    what = "steps with few prompt tokens go on"
    instead = "are computed as longer prompts are"

    def __init__(
        self,
        model: Decoder,
        slots: Slots,
        layers: list[PagedKVLayer],
        max_tokens: int,
        max_model_len: int,
        choices: RoutedExpertsRecorder | None = None,
    ) -> None:
        super().__init__(model)
        self.slots, self.layers, self.choices = slots, layers, choices
        self.sizes = mixed_sizes(model, max_tokens)
        self.max_len = min(MOST_LENGTH, max_model_len)
        most = slots.num_slots * -(-self.max_len // SPLIT)
        self.split_sizes = sorted({min(num, most) for num in _SPLITS})
        heads, kv_heads = model.num_local_heads
        self._group, self._known_rows = heads // kv_heads, 0
        self._seen: set[tuple[int, int]] = set()
        self._attended: torch.Tensor | None = None

    @property
    def most_tokens(self) -> int:
        """Of the steps that these are for; 0 where no more can be captured."""
        return self.sizes[-1] if self.obstacle is None else 0

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        super().clear()
        self._attended, self._known_rows = None, 0

    def prepare_next(self, *, sparse: bool = False) -> bool:
        """Capture one graph; False where all are there or none can be."""
        missing = self.missing(sparse=sparse)
        return bool(missing) and self._prepare(missing[0])

    def missing(self, *, sparse: bool = False) -> list[tuple[int, int]]:
        """Keys of all that can be captured and are not, the largest first, whose memory the smaller ones share.

        Args:
            sparse: of every other size alone.
        """
        if self.obstacle is not None:
            return []
        keys = [(size, num) for size in self.sizes[:: -2 if sparse else -1] for num in reversed(self.split_sizes)]
        return [key for key in keys if key not in self._captured]

    def plan(self, chunks: list[Chunk]) -> Planned | None:
        """What holds a step, single tokens first; None where it is too large for all, or nothing can be captured."""
        lengths, ends = [chunk.end - chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
        num_tokens = sum(lengths)
        if num_tokens > self.sizes[-1] or max(ends) > self.max_len:
            return None
        work = Work.of(lengths, ends, self._group, self._tile_rows)
        fitting = (n for n in self.sizes if n >= num_tokens and self._num_tiles(n) >= len(work.tiles))
        size = next(fitting, None)
        num_splits = next((num for num in self.split_sizes if num >= len(work.splits)), None)
        if size is None or num_splits is None:
            return None
        key = size, num_splits
        if self.obstacle is not None and not self._has(key):
            return None
        return Planned(key, num_tokens, work)

    def run(self, planned: Planned, chunks: list[Chunk], slots: list[int]) -> torch.Tensor | None:
        """A step's hidden states [T, hidden_size]; None where its key comes for the first time.

        Args:
            planned: see plan.
            chunks: as there.
            slots: of their sequences.
        """
        key = planned.key
        if key not in self._seen and not self._has(key):
            self._seen.add(key)
            return None
        step = self._find(key)
        return None if step is None else self._replay(step, planned, chunks, slots)

    def run_uncaptured(self, key: tuple[int, int]) -> None:
        """Compute such a step over padding: what it launches is compiled then."""
        shape = self._shape(key)
        self._forward(empty_vector(shape, pinned=False).to(self.model.device), shape)

    @property
    def _tile_rows(self) -> int:
        """Those of a cache, of which a later one may have other formats."""
        if not self._known_rows:
            self._known_rows = mixed_tile_rows(self.layers, exact=self.model.numerics.exact)
        return self._known_rows

    def _has(self, key: tuple[int, int]) -> bool:
        return not self._captured.keys().isdisjoint((key, self._cover(key)))

    def _cover(self, key: tuple[int, int]) -> tuple[int, int] | None:
        size, num_splits = key
        most = size + max(64, size // 4)
        larger = (each for each in self._captured if size <= each[0] <= most and each[1] >= num_splits)
        return min(larger, default=None)

    def _num_tiles(self, size: int) -> int:
        return size * self._group // self._tile_rows + min(size, self.slots.num_slots, _SPARE_TILES)

    def _shape(self, key: tuple[int, int]) -> MixedShape:
        size, num_splits = key
        num_slots = self.slots.num_slots
        return MixedShape(size, min(size, num_slots), num_splits, self._num_tiles(size), num_slots)

    def _replay(self, step: MixedStep, planned: Planned, chunks: list[Chunk], slots: list[int]) -> torch.Tensor:
        is_gpu = step.vector.is_cuda
        step.vector.copy_(fill_vector(step.shape, chunks, slots, planned.work, pinned=is_gpu), non_blocking=is_gpu)
        step.graph.replay()
        return step.hidden[: planned.num_tokens]

    def _capture(self, key: tuple[int, int]) -> MixedStep:
        shape = self._shape(key)
        vector = empty_vector(shape, pinned=False).to(self.model.device)
        self._buffer()
        with self._recorder.ready():
            try_out(lambda: self._forward(vector, shape))
            graph, hidden = self._recorder.record(lambda: self._forward(vector, shape))
        return MixedStep(shape, vector, graph, borrow(hidden))

    def _run_once(self, step: MixedStep) -> None:
        step.graph.replay()

    def _buffer(self) -> torch.Tensor:
        """[T, H, D] for the results of all attentions: padding tokens' rows keep finite numbers."""
        if self._attended is None:
            heads = self.sizes[-1], self.model.num_local_heads[0], self.model.config.head_dim
            self._attended = torch.zeros(heads, dtype=self.model.dtype, device=self.model.device)
        return self._attended

    def _forward(self, vector: torch.Tensor, shape: MixedShape) -> torch.Tensor:
        inputs = MixedInputs.of(vector, shape)
        num_pages = -(-self.max_len // PAGE_SIZE)
        tables = self.slots.tables[inputs.slots.long(), :num_pages]  # [B, pages]
        ids, positions, sequences = (x.long() for x in inputs[:3])
        pages = tables[sequences.clamp(min=0), positions // PAGE_SIZE].long()
        slot_mapping = torch.where(sequences >= 0, pages * PAGE_SIZE + positions % PAGE_SIZE, -1)
        token_ids = torch.where(ids < 0, self.slots.last_token[(-1 - ids).clamp(min=0)], ids)
        context = MixedContext(
            positions, slot_mapping, inputs.batch(tables), self.layers, self.model.numerics.exact,
            self._buffer()[: shape.num_tokens],
        )  # fmt: skip
        with contextlib.nullcontext() if self.choices is None else self.choices.recording(slot_mapping):
            return self.model(token_ids, context)


class MixedContext(PagesContext):
    """How a captured step's tokens meet the keys and values in the pages.

    Args:
        positions: see PagesContext.
        slot_mapping: likewise.
        batch: the step's distribution over sequences.
        layers: the cache.
        exact: the model's numerics.
        attended: [T, H, D], where attentions leave their results.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        batch: MixedBatch,
        layers: list[PagedKVLayer],
        exact: bool,
        attended: torch.Tensor,
    ) -> None:
        self.positions, self.slot_mapping, self.layers = positions, slot_mapping, layers
        self._batch, self._exact, self._attended = batch, exact, attended

    def attend_cached(self, layer_index: int, q: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
        layer, out = self.layers[layer_index], self._attended
        attention_mixed(q, layer, self._batch, out, softmax_scale=softmax_scale, exact=self._exact)
        return out


def can_mix(model: Decoder) -> bool:
    """Whether attention over a model's cache has the kernel that reads its work from the device."""
    return has_kernel(model.dtype, model.config.head_dim, model.device)


def mixed_sizes(model: Decoder, max_tokens: int) -> list[int]:
    """Sizes that a model's steps of up to so many tokens are filled up to as one graph."""
    sizes = sizes_for(model, max_tokens)
    return [size for size in sizes if size <= MOST_TOKENS] or sizes[:1]
