"""CUDA graphs of what a step with prompts computes between two attentions, for steps that mixed_graphs.py leaves.

There the CPU would take longer to launch the kernels than the GPU to run them. Attention itself depends on how the
tokens are distributed over sequences and is launched as ever; the pieces before, between and behind depend on their
number alone. A step takes the pieces of the next larger size, filled up with padding tokens.
"""

from typing import NamedTuple

import torch

from octavo.models import Decoder
from octavo.numerics import Numerics, QuantizedTensor, Scaling
from octavo.ops.attention import PagedKVLayer
from octavo.ops.attention.varlen import empty_scale, rows_of, stores_codes
from octavo.ops.gemm.scaled_mm import unpadded_rows
from octavo.serve.engine.caching_context import PagesContext
from octavo.serve.engine.expert_choices import RoutedExpertsRecorder
from octavo.serve.engine.graph_capture import CapturedSteps, GraphRecorder, borrow
from octavo.serve.engine.paged_context import PagedContext
from octavo.serve.engine.waiting import try_out

# tokens; beyond the last one GPU has more to do than the CPU; of several each has less to do, and of experts one too
_SIZES = (*range(64, 513, 64), *range(640, 2049, 128))
_MOST_TOKENS, _WIDE_STEP = _SIZES[-1], 512


class Stop(NamedTuple):
    """An attention between two pieces.

    Attributes:
        layer_index: whose it is.
        queries: [T, H, D], what the piece before leaves.
        softmax_scale: of the scores.
        out: where the result goes: [T, H, D], or codes [T, H * D].
    """

    layer_index: int
    queries: torch.Tensor
    softmax_scale: float
    out: torch.Tensor | QuantizedTensor


class StepPieces(NamedTuple):
    """A captured step.

    Attributes:
        inputs: [3, T] int64, token ids, positions and slots in the cache (-1 for a padding token).
        pieces: one more than stops.
        hidden: [T, hidden_size], what the last piece leaves.
    """

    inputs: torch.Tensor
    pieces: list[torch.cuda.CUDAGraph]
    stops: list[Stop]
    hidden: torch.Tensor


class PromptGraphs(CapturedSteps[int, StepPieces]):
    """Captures pieces for sizes that come a second time, and replays them.

    Args:
        model: what is captured.
        layers: the cache, one entry a layer.
        max_tokens: of a step.
        choices: where the experts of each token are recorded; None for nowhere.

    Attributes:
        sizes: tokens that steps are filled up to, rising.
    """

    what = "prompts go on"

    def __init__(
        self, model: Decoder, layers: list[PagedKVLayer], max_tokens: int, choices: RoutedExpertsRecorder | None = None
    ) -> None:
        super().__init__(model)
        self.layers, self.choices = layers, choices
        self.sizes = sizes_for(model, max_tokens)
        self._seen: set[int] = set()
        self._places: AttendedPlaces | None = None

    def clear(self) -> None:
        """Drop all pieces and their memory."""
        super().clear()
        self._places = None

    def prepare_next(self, above: int = 0, *, sparse: bool = False) -> bool:
        """Capture the pieces of one size; False where all are there or none can be. Arguments as missing."""
        missing = self.missing(above, sparse=sparse)
        return bool(missing) and self._prepare(missing[0])

    def missing(self, above: int = 0, *, sparse: bool = False) -> list[int]:
        """All sizes that can be captured and are not, the largest first, whose memory the smaller ones share.

        Args:
            above: only sizes above this many tokens.
            sparse: every other one of them all.
        """
        if self.obstacle is not None:
            return []
        return [size for size in self.sizes[:: -2 if sparse else -1] if size not in self._captured and size > above]

    def run(self, token_ids: torch.Tensor, context: PagedContext) -> torch.Tensor | None:
        """A step's hidden states [T, hidden_size]; None where it is too large, or of a size for the first time."""
        num_tokens = token_ids.shape[0]
        size = next((size for size in self.sizes if size >= num_tokens), None)
        if size is None or size - num_tokens >= _WIDE_STEP:
            return None
        if size not in self._seen and self._captured.keys().isdisjoint((size, self._cover(size))):
            self._seen.add(size)
            return None
        step = self._find(size)
        return None if step is None else self._replay(step, token_ids, context)

    def _cover(self, key: int) -> int | None:
        larger = [size for size in self.sizes if size > key][:1]
        return next((size for size in larger if size in self._captured and size - key <= max(64, key // 4)), None)

    def _replay(self, step: StepPieces, token_ids: torch.Tensor, context: PagedContext) -> torch.Tensor:
        num_tokens = token_ids.shape[0]
        for row, values in zip(step.inputs, (token_ids, context.positions, context.slot_mapping), strict=True):
            row[:num_tokens].copy_(values)
        step.inputs[2, num_tokens:].fill_(-1)
        for piece, stop in zip(step.pieces, step.stops, strict=False):
            piece.replay()
            queries, out = stop.queries[:num_tokens], rows_of(stop.out, 0, num_tokens)
            context.attend_into(out, stop.layer_index, queries, softmax_scale=stop.softmax_scale)
        step.pieces[-1].replay()
        return step.hidden[:num_tokens]

    def _capture(self, key: int) -> StepPieces:
        model, size = self.model, key
        inputs = torch.zeros(3, size, dtype=torch.int64, device=model.device)
        inputs[2].fill_(-1)
        if self._places is None:
            self._places = AttendedPlaces(self.sizes[-1], model)
        places = self._places
        with self._recorder.ready():
            try_out(lambda: self._forward(inputs, _Between(inputs, self.layers, places, None)))
            between = _Between(inputs, self.layers, places, self._recorder)
            with self._recorder.recording():
                hidden = self._forward(inputs, between)
                between.pieces.append(self._recorder.end())
        return StepPieces(inputs, between.pieces, between.stops, borrow(hidden))

    def _run_once(self, step: StepPieces) -> None:
        for piece in step.pieces:
            piece.replay()

    def _forward(self, inputs: torch.Tensor, context: "_Between") -> torch.Tensor:
        if self.choices is None:
            return self.model(inputs[0], context)
        with self.choices.recording(inputs[2]):
            return self.model(inputs[0], context)


def sizes_for(model: Decoder, max_tokens: int) -> list[int]:
    """Sizes that a model's steps of up to so many tokens are filled up to."""
    num_gpus = 1 if model.tensor_group is None else model.tensor_group.size
    return step_sizes(max_tokens, model.numerics, num_gpus, has_experts=model.config.num_experts > 0)


def step_sizes(most: int, numerics: Numerics, num_gpus: int = 1, *, has_experts: bool = False) -> list[int]:
    """Tokens that steps are filled up to, rising, up to the first that holds so many; FP8 products pad none of them.

    Of a model that is cut among GPUs larger steps, and full ones; of experts full ones, whose many small kernels take
    the CPU as long as the GPU: 82 ms for 8192 tokens of 30B-A3B with a scale a row, where launched one by one 155.
    """
    given = (*_SIZES, *range(_MOST_TOKENS + _WIDE_STEP, num_gpus * _MOST_TOKENS + 1, _WIDE_STEP))
    if (num_gpus > 1 or has_experts) and most > given[-1]:
        given = (*given, most)
    sizes = sorted({unpadded_rows(n, numerics.exact) if numerics.recipe.is_fp8 else n for n in given})
    enough = next((i for i, size in enumerate(sizes) if size >= most), len(sizes) - 1)
    return sizes[: enough + 1]


class AttendedPlaces:
    """Where attentions leave their results, for steps of all sizes: one is used up before the next is made.

    What stands behind a step's tokens is finite.

    Args:
        most_tokens: of a step.
        model: whose attentions.
    """

    def __init__(self, most_tokens: int, model: Decoder) -> None:
        self._shape = (most_tokens, model.num_local_heads[0], model.config.head_dim)
        self._dtype, self._device = model.dtype, model.device
        self.makes_codes = not model.numerics.exact  # whose attention stays with the pages
        self._rows: torch.Tensor | None = None
        self._codes: torch.Tensor | None = None
        self._coded: dict[int, QuantizedTensor] = {}  # by a step's tokens: scales have its layout

    def rows(self, num_tokens: int) -> torch.Tensor:
        """[T, H, D]."""
        if self._rows is None:
            self._rows = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._rows[:num_tokens]

    def codes(self, num_tokens: int, scaling: Scaling) -> QuantizedTensor:
        """[T, H * D], of which all attentions have one scaling."""
        if num_tokens not in self._coded:
            most, heads, dim = self._shape
            if self._codes is None:
                self._codes = torch.zeros(most, heads * dim, dtype=torch.uint8, device=self._device)
            scale = empty_scale(num_tokens, heads * dim, scaling, self._device).fill_(1.0)
            codes = self._codes[:num_tokens].view(scaling.dtype)
            self._coded[num_tokens] = QuantizedTensor(codes, scale, scaling)
        assert self._coded[num_tokens].scaling == scaling, "one kind of scaling stays within a token"
        return self._coded[num_tokens]


class _Between(PagesContext):
    """The context under which pieces are captured: an attention ends one and begins the next.

    Args:
        inputs: StepPieces'.
        layers: the cache.
        places: where attentions leave their results.
        recorder: None for a forward pass that records nothing.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        layers: list[PagedKVLayer],
        places: AttendedPlaces,
        recorder: GraphRecorder | None,
    ) -> None:
        self.positions, self.slot_mapping, self.layers = inputs[1], inputs[2], layers
        self._places, self._recorder = places, recorder
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self.stops: list[Stop] = []

    def attend_cached(self, layer_index: int, q: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
        out = self._places.rows(q.shape[0])
        self._stop(layer_index, q, softmax_scale, out)
        return out

    def attend_to_codes(
        self, layer_index: int, q: torch.Tensor, out_scaling: Scaling, softmax_scale: float
    ) -> QuantizedTensor | None:
        is_known = self._places.makes_codes and self.layers[layer_index].attention_dtype == "bf16"
        if not is_known or not stores_codes(q, out_scaling):
            return None
        out = self._places.codes(q.shape[0], out_scaling)
        self._stop(layer_index, q, softmax_scale, out)
        return out

    def _stop(
        self, layer_index: int, q: torch.Tensor, softmax_scale: float, out: torch.Tensor | QuantizedTensor
    ) -> None:
        if self._recorder is not None:
            q = q.contiguous()
            self.pieces.append(self._recorder.end())
            self.stops.append(Stop(layer_index, borrow(q), softmax_scale, out))
            self._recorder.begin()
