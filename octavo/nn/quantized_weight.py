"""A linear's 8-bit weight: which row ranges are quantized as one operand, and the copies kept for one weight version.

Fused projections are fused in storage, never in meaning: each part keeps the blocks and scales it would have alone.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from octavo.errors import RecipeError
from octavo.nn.write_watch import WriteWatch, is_capturing
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize, quantize_both, quantize_columns

# Names of delayed scaling's buffers in a linear, and so in state dicts and checkpoints.
HISTORY_BUFFER, SCALE_BUFFER = "fp8_amax_history", "fp8_quant_scale"
DELAYED_BUFFERS = (HISTORY_BUFFER, SCALE_BUFFER)

Operands = list[tuple[slice, QuantizedTensor]]  # (rows of the weight, their codes)


def row_ranges(parts: tuple[int, ...], scaling: Scaling) -> list[slice]:
    """Row ranges that can be quantized as one operand without a block crossing from one part into the next."""
    if len(parts) == 1:
        return [slice(0, parts[0])]
    block_rows = scaling.block_size[0]
    if block_rows == 1 or (block_rows > 1 and all(p % block_rows == 0 for p in parts[:-1])):
        return [slice(0, sum(parts))]
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return [slice(start, start + part) for start, part in zip(starts, parts, strict=True)]


def ranges_of(weight: torch.Tensor, parts: tuple[int, ...], scaling: Scaling) -> list[tuple[slice, torch.Tensor]]:
    """The row ranges with the values that are quantized there, bf16."""
    values, ranges = _values(weight), row_ranges(parts, scaling)
    return [(ranges[0], values)] if len(ranges) == 1 else [(rows, values[rows]) for rows in ranges]


def _values(weight: torch.Tensor) -> torch.Tensor:
    """The weight in bf16, apart from autograd."""
    values = weight.detach() if torch.is_grad_enabled() else weight
    return values if values.dtype == torch.bfloat16 else values.to(torch.bfloat16)


def quantize_forward(
    weight: torch.Tensor, parts: tuple[int, ...], scaling: Scaling, place: Operands | None = None
) -> Operands:
    """Operands of the output GEMM: the weight quantized along K.

    Args:
        weight: [N, K]; what is quantized is its bf16 value.
        place: older operands of such a weight, which are overwritten and returned (WeightCache.place_for).
    """
    ranges = ranges_of(weight, parts, scaling)
    return [(rows, quantize(source, scaling, out=out_of(place, i))) for i, (rows, source) in enumerate(ranges)]


def out_of(place: Operands | None, i: int) -> QuantizedTensor | None:
    """The operand of range i that a quantizer overwrites, None for a new one."""
    return None if place is None else place[i][1]


def quantize_ahead(
    weight: torch.Tensor,
    parts: tuple[int, ...],
    scaling: Scaling,
    known: dict[str, Any],
    place: Operands | None = None,
) -> tuple[Operands, Operands] | None:
    """quantize_forward and quantize_backward from one read of the weight; None where it has more than one range.

    Args:
        known: the scale and the place of the amax (delayed scaling), as quantize takes them.
        place: as in quantize_forward.
    """
    ranges = row_ranges(parts, scaling)
    if len(ranges) > 1:
        return None
    rows, columns = quantize_both(_values(weight), scaling, out=out_of(place, 0), **known)
    return [(ranges[0], rows)], [(ranges[0], columns)]


def quantize_backward(
    weight: torch.Tensor | None, parts: tuple[int, ...], scaling: Scaling, *, quant_scale: torch.Tensor | None = None
) -> Operands:
    """Operands of the grad_input GEMM: the weight quantized along N, [K, N] a range.

    That GEMM sums over the parts of a fused weight, so scales of whole tensors are made for all of them together: the
    smallest quant_scale of any.

    Args:
        quant_scale: known scales of the parts (delayed scaling).
    """
    if weight is None:
        raise RecipeError(
            f"this layer holds {scaling.kind} codes only, and a backward with such scales needs the high-precision "
            "weight; load the checkpoint for training, or use 'blockwise'"
        )
    if scaling.is_per_tensor:
        known = quant_scale if quant_scale is None or quant_scale.numel() == 1 else quant_scale.min()
        return [(slice(0, weight.shape[0]), quantize_columns(_values(weight), scaling, quant_scale=known))]
    return [(rows, quantize_columns(source, scaling)) for rows, source in ranges_of(weight, parts, scaling)]


def transpose_codes(forward: Operands) -> Operands:
    """Operands of the grad_input GEMM from codes alone, which square blocks allow."""
    return [(rows, q.t()) for rows, q in forward]


def one_operand(operands: Operands) -> QuantizedTensor | None:
    """The whole weight as one operand of the output GEMM, or None where that takes a GEMM a range.

    Parts with one scale each become rows with one scale each, equal within a part: the same codes and meaning.
    """
    first = operands[0][1]
    if len(operands) == 1:
        return first
    if not first.scaling.is_per_tensor:
        return None
    codes = torch.cat([q.qdata.view(torch.uint8) for _, q in operands]).view(first.qdata.dtype)
    scale = torch.cat([q.scale.expand(q.shape[0], 1) for _, q in operands])  # [N, 1]
    return QuantizedTensor(codes, scale, dataclasses.replace(first.scaling, block_size=(1, -1)))


def join_ranges(operands: Operands) -> tuple[Operands, QuantizedTensor | None]:
    """The ranges and one_operand of them, as one storage: the ranges are views of the whole where there is one."""
    whole = one_operand(operands)
    if whole is None or len(operands) == 1:
        return operands, whole
    return [(rows, QuantizedTensor(whole.qdata[rows], q.scale, q.scaling)) for rows, q in operands], whole


def name_tensors(operands: Operands, whole: QuantizedTensor | None) -> dict[str, torch.Tensor]:
    """What the output GEMM reads of a weight's codes, each storage once, under names that follow from the ranges."""
    named: dict[str, torch.Tensor] = {}
    for i, (_, q) in enumerate(operands):
        named |= {f"codes.{i}": q.qdata, f"scales.{i}": q.scale}
    if whole is not None and len(operands) > 1:
        named["scales"] = whole.scale
    return named


def merge_parts(parts: list[QuantizedTensor], sizes: tuple[int, ...]) -> Operands:
    """Operands from one QuantizedTensor a part, as a checkpoint holds them."""
    scaling = parts[0].scaling
    ranges = row_ranges(sizes, scaling)
    if len(ranges) == len(parts):
        return list(zip(ranges, parts, strict=True))
    codes = torch.cat([p.qdata.view(torch.uint8) for p in parts]).view(scaling.dtype)
    return [(ranges[0], QuantizedTensor(codes, torch.cat([p.scale for p in parts]), scaling))]


def moved_device(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.device:
    """Where Module._apply's fn moves a tensor that keeps its dtype."""
    return fn(torch.empty(0, device=tensor.device)).device


_keeps_codes = contextvars.ContextVar("octavo_keeps_codes", default=False)


@contextlib.contextmanager
def captured_with_codes() -> Iterator[None]:
    """Within, a CUDA graph that is captured reads the codes that were made before it, as inference wants it.

    Whoever replays it sees to it that they are still those of the weight, at the same addresses.
    """
    token = _keeps_codes.set(True)
    try:
        yield
    finally:
        _keeps_codes.reset(token)


def is_captured(weight: torch.Tensor | None = None) -> bool:
    """Whether a graph is being recorded, whose replays must make the codes anew: nothing of it may be kept.

    Args:
        weight: where it is known; one on a GPU says that CUDA is in use.
    """
    if torch.compiler.is_compiling():
        return True
    # Before CUDA is used nothing captures it, and is_available would ask the driver each time.
    is_used = torch.cuda.is_initialized() if weight is None else weight.is_cuda
    return is_used and is_capturing() and not _keeps_codes.get()


class _OptimizerSteps:
    """Counts the steps of every torch optimizer: fused ones write weights without moving Tensor._version."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


_optimizer_steps = _OptimizerSteps()


def weight_state(weight: torch.Tensor) -> tuple[int, int, int]:
    """Changes when a weight may have: by an in-place operation, other storage, or, if trained, any optimizer's step.

    Not by a write into .data: that needs mark_weights_updated.
    """
    in_place = 0 if weight.is_inference() else weight._version
    return in_place, weight.data_ptr(), _optimizer_steps.count if weight.requires_grad else 0


class WeightCache:
    """The 8-bit copies of one weight version; derived state, never in a state dict, a pickle or a deep copy.

    Attributes:
        forward: codes for the output GEMM, a range each. whole: the same as one operand, where that is not forward[0].
        backward: codes for the grad_input GEMM.
        is_ahead: backward was made by a forward, and no backward has read it yet.
        goes_ahead: a forward may do so; over once one did in vain.
        has_waited: a backward has read codes that were there before it, so memory has room for them in a forward.
        is_pinned: somebody reads forward and whole by their addresses, so new codes are made where the old ones are.
    """

    def __init__(self) -> None:
        self._weight: Callable[[], torch.Tensor | None] = lambda: None
        self._key: object = None
        self._observed = False
        self.forward: Operands | None = None
        self.whole: QuantizedTensor | None = None
        self.backward: Operands | None = None
        self.is_ahead, self.goes_ahead, self.has_waited = False, True, False
        self.is_pinned = False
        self.watch = WriteWatch()
        self._place: tuple[Operands, QuantizedTensor | None] | None = None

    def __reduce__(self) -> tuple[type["WeightCache"], tuple[()]]:
        return WeightCache, ()

    def start(self, weight: torch.Tensor, key: object, observe: bool) -> "WeightCache":
        """Drop the copies unless they were made of this tensor for this key, and by a training forward if one asks.

        Returns:
            The cache itself.
        """
        if self._weight() is weight and key == self._key and (self._observed or not observe):
            return self
        if self.is_pinned and self.forward is not None:
            self._place = self.forward, self.whole
        if self.is_ahead:
            self.drop_ahead()
        self._weight, self._key, self._observed = weakref.ref(weight), key, observe
        self.forward = self.whole = self.backward = None
        self.has_waited = False
        self.watch.begin(weight)
        return self

    def held_for(self, weight: torch.Tensor, *key: object) -> tuple[Operands, Recipe] | None:
        """The codes for the output GEMM that are kept for this tensor and this key, a recipe's left out."""
        held_key: Any = self._key
        if self.forward is None or self._weight() is not weight or held_key[:-1] != key:
            return None
        return self.forward, held_key[-1]

    def drop_ahead(self) -> None:
        """Give up codes that a forward made for a backward which did not come."""
        self.backward, self.is_ahead, self.goes_ahead = None, False, False

    def place_for(self, weight: torch.Tensor, parts: tuple[int, ...], scaling: Scaling) -> Operands | None:
        """The pinned operands that quantizers of this weight are to overwrite, None for new ones; then comes put."""
        if self._place is None:
            return None
        held, ranges = self._place[0], row_ranges(parts, scaling)
        if [rows for rows, _ in held] != ranges or held[0][1].device != weight.device:
            return None
        fits = all(q.shape[1] == weight.shape[1] and q.scaling == scaling for _, q in held)
        return held if fits else None

    def put(self, operands: Operands) -> Operands:
        """Keep new codes for the output GEMM, those that were made in the place of pinned ones as these."""
        self.forward, place = operands, self._place
        if place is not None and operands[0][1] is place[0][0][1]:
            held, whole = place
            if whole is not None and len(held) > 1:  # a scale a row, equal within a range
                for rows, q in held:
                    whole.scale[rows].copy_(q.scale)
            self.forward, self.whole = place
        self._place = None
        return self.forward

    def adopt(self, weight: torch.Tensor, key: object) -> None:
        """Take the codes that are kept for those of this tensor and key: they were written together with it."""
        self._weight, self._key, self._observed, self.backward = weakref.ref(weight), key, False, None
        self.is_ahead = self.has_waited = False
        self.watch.begin(weight)


# The 8-bit copies of weights that are no octavo Linear's; a cache holds its weight weakly and goes with it.
plain_caches = WeakIdKeyDictionary()


class DelayedState:
    """Histories and scales of delayed scaling for one linear: slots input, grad_output, then one a weight range.

    The tensors are the linear's own fp32 buffers, so that a state dict carries them; updates are in place. A linear
    keeps one of these for the views that it holds; like all derived state it is in no copy and no pickle.
    """

    INPUT, GRAD_OUTPUT, WEIGHT = 0, 1, 2

    def __init__(self, history: torch.Tensor, quant_scale: torch.Tensor) -> None:
        self.history, self.quant_scale = history, quant_scale
        self._kept_for: object = None
        self._known: dict[tuple[int, bool], dict[str, Any]] = {}
        self._weight_scales: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def keep_for(self, recipe: Recipe) -> "DelayedState":
        """Take note of what is_of will ask; returns self."""
        self._kept_for = (recipe, self.history.data_ptr(), self.quant_scale.data_ptr())
        return self

    def is_of(self, history: object, quant_scale: object, recipe: Recipe) -> bool:
        """Whether it is kept for this recipe and these buffers, and they are where they were."""
        if self.history is not history or self.quant_scale is not quant_scale:
            return False
        return self._kept_for == (recipe, self.history.data_ptr(), self.quant_scale.data_ptr())

    @staticmethod
    def num_slots(parts: tuple[int, ...], recipe: Recipe) -> int:
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        return 2 + len(row_ranges(parts, recipe.weight))

    @property
    def weight_scales(self) -> torch.Tensor:
        """quant_scale of every weight range."""
        if self._weight_scales is None:
            self._weight_scales = self.quant_scale[self.WEIGHT :]
        return self._weight_scales

    def known(self, slot: int, *, observe: bool) -> dict[str, Any]:
        """The slot's scale as a quantizer's keyword arguments; where observe is set, it stages x's amax as well."""
        known = self._known.get((slot, observe))
        if known is None:
            known = self._known[slot, observe] = {"quant_scale": self.quant_scale[slot]}
            if observe:
                known["amax_out"] = self.history[0, slot : slot + 1]
        return known
