"""Routing of a mixture of experts: which experts a token goes to, and the batch sorted by expert and back.

Sizes follow from shapes alone, so that nothing waits for a GPU: groups are padded in a buffer large enough for all.
"""

from typing import NamedTuple

import torch

from octavo import env
from octavo.errors import ConfigError, DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.moe.reference import (
    combine_reference,
    dispatch_codes_reference,
    dispatch_reference,
    given_routing_reference,
    moe_routing_reference,
    num_rows,
    scale_layout,
    softmax_rows,
)

__all__ = [
    "ExpertRows",
    "Routing",
    "combine_rows",
    "dispatch_codes",
    "dispatch_rows",
    "moe_routing",
    "num_rows",
    "softmax_rows",
]


class Routing(NamedTuple):
    """Where each token goes. T tokens, S experts a token, E experts, R rows of the batch sorted by expert.

    Attributes:
        weights: [T, S] fp32, what each expert's output is multiplied by.
        experts: [T, S] int64, the likeliest first.
        probs: [T, E] fp32, the softmax of the logits.
        rows: [T, S] int64, the row of the sorted batch that each slot is.
        slots: [R] int64, the slot t * S + s that each row is; T * S for a row that only pads.
        offsets: [E] int32, where each expert's rows end, its padding included; rows past the last are unused.
    """

    weights: torch.Tensor
    experts: torch.Tensor
    probs: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor


class ExpertRows(NamedTuple):
    """What experts made, before combine_rows: a matrix [T, H] that a kernel which reads it may add up on the way.

    Attributes:
        rows: [R, H], the sorted batch.
        routing: where each token's rows are.
    """

    rows: torch.Tensor
    routing: Routing

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return torch.Size((self.routing.rows.shape[0], self.rows.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.rows.dtype

    def whole(self) -> torch.Tensor:
        """[T, H]."""
        return combine_rows(self.rows, self.routing)


def _fake(logits, top_k, normalize, alignment):  # type: ignore[no-untyped-def]
    T, E = logits.shape
    chosen = logits.new_empty((T, top_k), dtype=torch.int64)
    return (
        logits.new_empty((T, top_k), dtype=torch.float32),
        chosen,
        logits.new_empty((T, E), dtype=torch.float32),
        torch.empty_like(chosen),
        logits.new_empty((num_rows(T * top_k, E, alignment),), dtype=torch.int64),
        logits.new_empty((E,), dtype=torch.int32),
    )


def _fake_codes(codes, scale, slots, num_slots):  # type: ignore[no-untyped-def]
    layout = scale_layout(slots.shape[0], scale.shape[1])
    return codes.new_empty((slots.shape[0], codes.shape[1])), scale.new_empty_strided(*layout)


def _route_cuda(logits, top_k, normalize, alignment):  # type: ignore[no-untyped-def]
    if not env.force_reference():
        from octavo.ops.moe import triton

        if triton.can_route(logits):
            return triton.moe_routing(logits, top_k, normalize, alignment)
    return moe_routing_reference(logits, top_k, normalize, alignment)


def _has_kernel(x: torch.Tensor) -> bool:
    return x.numel() > 0 and x.element_size() <= 4


_op = register(
    "moe_routing(Tensor logits, int top_k, bool normalize, int alignment) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=moe_routing_reference,
    fake=_fake,
    cuda=_route_cuda,
)
_given = register(
    "moe_routing_given(Tensor logits, Tensor experts, bool normalize, int alignment) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=given_routing_reference,
    fake=lambda logits, experts, normalize, alignment: _fake(logits, experts.shape[1], normalize, alignment),
    cuda=given_routing_reference,
)
_dispatch = register(
    "moe_dispatch(Tensor x, Tensor slots, int num_slots) -> Tensor",
    reference=dispatch_reference,
    fake=lambda x, slots, num_slots: x.new_empty((slots.shape[0], x.shape[1])),
    cuda=kernel_or_reference("moe.triton.dispatch_rows", dispatch_reference, takes=_has_kernel),
)
_dispatch_codes = register(
    "moe_dispatch_codes(Tensor codes, Tensor scale, Tensor slots, int num_slots) -> (Tensor, Tensor)",
    reference=dispatch_codes_reference,
    fake=_fake_codes,
    cuda=kernel_or_reference("moe.triton.dispatch_codes", dispatch_codes_reference, takes=_has_kernel),
)
_combine = register(
    "moe_combine(Tensor out, Tensor rows, Tensor? weights) -> Tensor",
    reference=combine_reference,
    fake=lambda out, rows, weights: out.new_empty((rows.shape[0], out.shape[1])),
    cuda=kernel_or_reference("moe.triton.combine_rows", combine_reference, takes=_has_kernel),
)


def moe_routing(
    logits: torch.Tensor, top_k: int, *, normalize: bool, alignment: int = 1, experts: torch.Tensor | None = None
) -> Routing:
    """Choose each token's experts, and where its rows stand in the batch sorted by expert.

    Args:
        logits: [T, E] of the router, any float dtype; the softmax is fp32.
        top_k: experts a token: those of the largest probabilities; of equal ones the lowest expert comes first.
        normalize: divide the chosen probabilities by their sum.
        alignment: each expert's rows are padded to a multiple of it.
        experts: [T, top_k] int64, distinct in a row: the caller's choice, in the order in which a token's
            outputs are added; the weights are of these logits. In torch on every device. None chooses here.
    Returns:
        Routing. Rows of one expert are in the tokens' order.
    Raises:
        ShapeError: logits is no matrix, or experts not of its tokens.
        DtypeError: experts holds no int64.
        ConfigError: top_k outside 1 to E, or an alignment below 1.
    Exactness: weights and experts of a token depend on its logits alone, bitwise within a device; between devices
        bitwise but where fp64's exponentials differ by so little that fp32 tells them apart, in 1 of some 10**8.
    """
    if logits.dim() != 2:
        raise ShapeError(f"logits must be a matrix [T, E], got shape {tuple(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise ConfigError(f"top_k must be 1 to the number of experts {logits.shape[1]}, got {top_k}")
    if alignment < 1:
        raise ConfigError(f"alignment must be at least 1, got {alignment}")
    if experts is None:
        return Routing(*_op(logits, top_k, normalize, alignment))
    if experts.dtype != torch.int64:
        raise DtypeError(f"experts must be int64, got {experts.dtype}")
    if tuple(experts.shape) != (logits.shape[0], top_k):
        raise ShapeError(f"experts must be [T, top_k] = {(logits.shape[0], top_k)}, got shape {tuple(experts.shape)}")
    return Routing(*_given(logits, experts, normalize, alignment))


def dispatch_rows(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The batch sorted by expert: each row a copy of its token, padding zero.

    Args:
        x: [T, H].
    Returns:
        [R, H] of x's dtype. The gradient is combine_rows(grad, routing, weighted=False).
    Raises:
        ShapeError: x has another number of tokens than routing.
    """
    if x.dim() != 2 or x.shape[0] != routing.rows.shape[0]:
        raise ShapeError(f"x must be [T, H] with T={routing.rows.shape[0]} routed tokens, got shape {tuple(x.shape)}")
    return _dispatch(x, routing.slots, routing.rows.shape[1])


def dispatch_codes(x: QuantizedTensor, routing: Routing) -> QuantizedTensor:
    """The batch sorted by expert of tokens that were quantized once: quantize(dispatch_rows(x)) without the copies.

    Args:
        x: [T, H], one scale for all, a row or a 1xB block.
    Returns:
        QuantizedTensor [R, H]; rows that pad have zeros, with the scale 1 unless all share one.
    Raises:
        ShapeError: x has another number of tokens than routing, or blocks of several rows.
    Exactness: bitwise quantize of dispatch_rows, but for the scale of padding where the scaling has an amax_floor.
    """
    num_tokens, num_slots = routing.rows.shape
    if x.shape[0] != num_tokens or x.scaling.block_size[0] > 1:
        raise ShapeError(
            f"codes of T={num_tokens} routed tokens, in blocks of one row, are dispatched; got shape {tuple(x.shape)} "
            f"in {x.scaling.kind}"
        )
    if x.scaling.is_per_tensor:
        codes = dispatch_rows(x.qdata.view(torch.uint8), routing).view(x.qdata.dtype)
        return QuantizedTensor(codes, x.scale, x.scaling)
    rows, scale = _dispatch_codes(x.qdata, x.scale, routing.slots, num_slots)
    return QuantizedTensor(rows, scale, x.scaling)


def combine_rows(out: torch.Tensor, routing: Routing, *, weighted: bool = True) -> torch.Tensor:
    """The sorted batch back to tokens: each token's rows times their weights, added in slot order in fp32.

    Args:
        out: [R, H].
        weighted: False adds the rows as they are.
    Returns:
        [T, H] of out's dtype, rounded once.
    Raises:
        ShapeError: out has another number of rows than routing.
    Exactness: bitwise within a device; no atomics.
    """
    if out.dim() != 2 or out.shape[0] != routing.slots.shape[0]:
        raise ShapeError(f"out must be [R, H] with R={routing.slots.shape[0]} rows, got shape {tuple(out.shape)}")
    return _combine(out, routing.rows, routing.weights if weighted else None)
