"""CUDA graphs of decode steps: one token a sequence, from the newest tokens to the next ones, sampling included.

A graph holds a batch size and a bound on the sequences' length; a step takes the smallest that fits, filled up with
padding rows. What varies is read from the slots and from one small tensor that each step sends.
"""

import contextlib
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.models import Decoder
from octavo.numerics import Numerics
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer
from octavo.ops.gemm.scaled_mm import unpadded_rows
from octavo.ops.gemm.skinny_mm import FEW_TOKENS, MAX_TOKENS
from octavo.ops.sampling import sample
from octavo.serve.engine.config import EngineConfig
from octavo.serve.engine.expert_choices import RoutedExpertsRecorder
from octavo.serve.engine.graph_capture import CapturedSteps, borrow
from octavo.serve.engine.paged_context import PagedContext
from octavo.serve.engine.slots import Slots
from octavo.serve.engine.waiting import try_out

SHORTEST = 512  # tokens; bounds on the length are this times a power of two


class StepGraph(NamedTuple):
    """One captured step.

    Attributes:
        inputs: [2, B] int32, sequence lengths (0 for a padding row) and slots.
        forward: the graph to logits.
        draw: the graph on to tokens.
        logits: [B, V] fp32, or this rank's share of the rows.
        tokens: [B] int64.
        group: the ranks that draw for a share of the rows each; None where this one does for all.
    """

    inputs: torch.Tensor
    forward: torch.cuda.CUDAGraph
    draw: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor
    group: TensorGroup | None = None

    @property
    def own_rows(self) -> slice:
        """The rows of the batch that this rank draws for."""
        rows = self.inputs.shape[1]
        return slice(0, rows) if self.group is None else self.group.share_of(rows)


class DecodeGraphs(CapturedSteps[tuple[int, int], StepGraph]):
    """Captures graphs as steps need them, and replays them.

    Args:
        model: read by the graphs.
        slots: read by the graphs.
        layers: the cache, one entry a layer.
        max_num_seqs: the engine's.
        max_model_len: the engine's.
        choices: where the experts of each token are recorded; None for nowhere.
    """

    what = "decoding goes on"

    def __init__(
        self,
        model: Decoder,
        slots: Slots,
        layers: list[PagedKVLayer],
        max_num_seqs: int,
        max_model_len: int,
        choices: RoutedExpertsRecorder | None = None,
    ) -> None:
        super().__init__(model)
        self.slots, self.layers, self.choices = slots, layers, choices
        self.max_model_len = max_model_len
        self.batch_sizes = batch_sizes(max_num_seqs, model.numerics)

    def find(self, num_rows: int, longest: int) -> StepGraph | None:
        """A graph for so many sequences of up to so many tokens, captured if need be; None where none can be."""
        return self._find((self._size(num_rows), self._bound(longest)))

    def _cover(self, key: tuple[int, int]) -> tuple[int, int] | None:
        size, bound = key
        return min((each for each in self._captured if size <= each[0] <= 2 * size and each[1] >= bound), default=None)

    def prepare_next(self, most_rows: int, longest: int, least_rows: int = 1, *, sparse: bool = False) -> bool:
        """Capture one graph that steps of so many sequences and tokens will need; False where all are there."""
        missing = self.missing(most_rows, longest, least_rows, sparse=sparse)
        return bool(missing) and self._prepare(missing[0])

    def missing(
        self, most_rows: int, longest: int, least_rows: int = 1, *, sparse: bool = False
    ) -> list[tuple[int, int]]:
        """Keys of all that these steps will need and that can be captured: short bounds first, large steps first, whose
        memory the smaller ones share.

        Args:
            sparse: every other size, under the longest bound: one of them holds each of these steps.
        """
        if self.obstacle is not None:
            return []
        first, last = (self.batch_sizes.index(self._size(rows)) for rows in (least_rows, most_rows))
        sizes = self.batch_sizes[first : last + 1][::-1]
        bounds = [self._bound(1)]
        while bounds[-1] < min(longest, self.max_model_len):
            bounds.append(self._bound(bounds[-1] + 1))
        if sparse:
            sizes, bounds = sizes[::2], bounds[-1:]
        return [(size, bound) for bound in bounds for size in sizes if (size, bound) not in self._captured]

    def forward(self, graph: StepGraph, seq_lens: Rows[int], slots: Rows[int]) -> None:
        """Replay up to the logits, for sequences of these lengths whose newest tokens are in their slots."""
        missing = graph.inputs.shape[1] - len(slots)
        rows = [[*seq_lens, *[0] * missing], [*slots, *[self.slots.num_slots] * missing]]
        graph.inputs.copy_(torch.tensor(rows, dtype=torch.int32).pin_memory(), non_blocking=True)
        graph.forward.replay()

    def _size(self, num_rows: int) -> int:
        return next(size for size in self.batch_sizes if size >= num_rows)

    def _bound(self, length: int) -> int:
        bound = SHORTEST
        while bound < length:
            bound *= 2
        return min(bound, self.max_model_len)

    def _capture(self, key: tuple[int, int]) -> StepGraph:
        size, bound = key
        inputs = self._padding(size)
        with self._recorder.ready():
            try_out(lambda: self._draw(inputs, self._logits(inputs, bound)))
            forward, logits = self._recorder.record(lambda: self._logits(inputs, bound))
            draw, tokens = self._recorder.record(lambda: self._draw(inputs, logits))
        return StepGraph(inputs, forward, draw, borrow(logits), borrow(tokens), drawing_group(self.model, size))

    def run_uncaptured(self, size: int, bound: int) -> None:
        """Compute such a step over padding: what it launches is compiled then."""
        inputs = self._padding(size)
        self._draw(inputs, self._logits(inputs, bound))

    def _padding(self, size: int) -> torch.Tensor:
        """StepGraph's inputs of padding rows alone."""
        rows = [torch.zeros(size, dtype=torch.int32), torch.full((size,), self.slots.num_slots, dtype=torch.int32)]
        return torch.stack(rows).to(self.model.device)

    def _run_once(self, step: StepGraph) -> None:
        step.forward.replay()
        step.draw.replay()

    def _logits(self, inputs: torch.Tensor, bound: int) -> torch.Tensor:
        seq_lens, slots = inputs[0], inputs[1].long()
        positions = (seq_lens - 1).clamp(min=0).long()
        tables = self.slots.tables[slots, : -(-bound // PAGE_SIZE)]  # [B, pages]
        page = tables.gather(1, (positions // PAGE_SIZE)[:, None])[:, 0].long()
        slot_mapping = torch.where(seq_lens > 0, page * PAGE_SIZE + positions % PAGE_SIZE, -1)
        context = PagedContext(
            positions=positions,
            slot_mapping=slot_mapping,
            page_tables=tables,
            cu_seqlens_q=torch.arange(inputs.shape[1] + 1, dtype=torch.int32, device=inputs.device),
            seq_lens=seq_lens.clamp(min=1),
            max_query_len=1,
            max_seq_len=bound,
            layers=self.layers,
            exact=self.model.numerics.exact,
        )
        with contextlib.nullcontext() if self.choices is None else self.choices.recording(slot_mapping):
            hidden = self.model(self.slots.last_token[slots], context)
        return decode_logits(self.model, hidden)

    def _draw(self, inputs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        slots, group = inputs[1].long(), drawing_group(self.model, inputs.shape[1])
        own = slice(None) if group is None else group.share_of(len(slots))
        tokens = sample(logits, *self.slots.controls(slots[own]), inputs[0, own].long())
        if group is not None:
            tokens = group.gather(tokens[None])[0]
        self.slots.last_token[slots] = tokens
        return tokens


def captures_steps(model: Decoder, config: EngineConfig) -> bool:
    """Whether an engine captures its steps: on a GPU, where rows that fill up a batch leave others' scales alone."""
    recipe = model.numerics.recipe
    is_shared = recipe.input is not None and recipe.input.is_per_tensor
    are_independent = not is_shared or recipe.has_state or recipe.static_input
    return model.device.type == "cuda" and not config.enforce_eager and are_independent


def drawing_group(model: Decoder, num_rows: int) -> TensorGroup | None:
    """The ranks of a head that is cut which draw for a share of a captured step's rows each; None where each does for
    all: the logits are no long message, or the ranks do not divide the rows."""
    group = model.head_group
    if group is None or num_rows % group.size:
        return None
    return group if group.is_long(4 * num_rows * model.config.vocab_size // group.size) else None


def decode_logits(model: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a captured step's rows [B, hidden_size]: [B, V] fp32, or this rank's share of the rows."""
    return model.logits(hidden, deals_rows=drawing_group(model, len(hidden)) is not None)


def reserve_logits(model: Decoder, config: EngineConfig) -> None:
    """Let ranks that deal logits out take the shared memory for it: that of the largest captured step."""
    sizes = batch_sizes(config.max_num_seqs, model.numerics) if captures_steps(model, config) else []
    for size in reversed(sizes):
        if (group := drawing_group(model, size)) is not None:
            hidden = torch.zeros(size, model.config.hidden_size, dtype=model.dtype, device=model.device)
            group.gather_rows(decode_logits(model, hidden), size)  # as for requests that change their logits
            return


def batch_sizes(most: int, numerics: Numerics) -> list[int]:
    """1, 2, 4, 8, then steps of about a sixth, up to the first that holds so many sequences.

    In FP8 they are sizes that products take without padding, which needs more kernels than they have: all but the small
    ones (exact: up to MAX_TOKENS), for which there is a kernel that pads nothing.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, most + 64, 64)
    if numerics.recipe.is_fp8:
        few = MAX_TOKENS if numerics.exact else FEW_TOKENS
        sizes = sorted({n if n <= few else unpadded_rows(n, numerics.exact) for n in sizes})
    enough = next(i for i, n in enumerate(sizes) if n >= most)
    if not numerics.recipe.is_fp8:
        sizes[enough] = most
    return sizes[: enough + 1]
