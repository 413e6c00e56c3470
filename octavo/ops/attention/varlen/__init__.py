"""Causal attention of each sequence's last tokens over all of its own, of any lengths: prompts, and packs that train.

Legend: T queries, Tk keys, H query heads, KH kv heads, D head_dim.
"""

import torch

from octavo import env
from octavo.errors import BackendError, DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import can_bypass_dispatcher
from octavo.ops.attention.library import attend_packed
from octavo.ops.attention.padding import TILE_ROWS, PackedLengths, VarlenBatch
from octavo.ops.attention.varlen.autograd import VarlenAttention
from octavo.ops.quantize import quantize

__all__ = [
    "TILE_ROWS",
    "VarlenBatch",
    "attend_varlen",
    "attention_varlen",
    "empty_codes",
    "empty_scale",
    "rows_of",
    "store_attended",
    "stores_codes",
    "takes_pack",
]


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: VarlenBatch,
    out: torch.Tensor | QuantizedTensor,
    *,
    softmax_scale: float,
) -> None:
    """Attend, through our kernel on Hopper where D is 64 or 128, else through torch's; not differentiable.

    Args:
        q: [T, H, D], 16 or 32 bits.
        k: [Tk, KH, D], same dtype; H a multiple of KH. Another sequence's NaNs do no harm.
        v: as k.
        batch: which of them belong together.
        out: where the result goes: [T, H, D] of q's dtype, or codes [T, H * D], contiguous.
        softmax_scale: more than 0.
    Raises:
        ShapeError: if heads, tokens and lengths do not fit together.
        DtypeError: q, k and v of several dtypes.
        BackendError: if softmax_scale is not positive.
    Exactness: not bitwise; within a few of bf16's last bits of attention in fp32. Codes are those that quantize makes
        of the result in q's dtype.
    """
    _check(q, k, v, batch, out)
    if not softmax_scale > 0:
        raise BackendError(f"attention_varlen takes a softmax_scale above 0, got {softmax_scale}; negate q instead")
    if not q.numel():
        return
    found: torch.Tensor | QuantizedTensor
    if _has_kernel(q):
        from octavo.ops.attention.varlen import triton

        is_stored = isinstance(out, torch.Tensor) or triton.can_quantize(out.scaling, q.shape[2])
        found = out if is_stored else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        triton.attention_varlen(q.contiguous(), k.contiguous(), v.contiguous(), batch, softmax_scale, found)
    else:
        # a GPU's library for equal lengths takes long over each new shape
        is_batch = batch.key_lengths is batch.lengths and not q.is_cuda
        key_lengths = None if is_batch else batch.key_lengths
        found = attend_packed(q, k, v, batch.lengths, softmax_scale, True, key_lengths)
    if isinstance(found, torch.Tensor) and found is not out:
        store_attended(found, out)


def takes_pack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: PackedLengths) -> bool:
    """Whether attend_varlen takes them; sequences of equal lengths are another kernel's."""
    return (
        not lengths.is_equal
        and all(can_bypass_dispatcher(x, has_gradient=False) for x in (q, k, v))
        and _has_kernel(q)
        and (lengths.has_tiles or not torch.cuda.is_current_stream_capturing())
    )


def attend_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: PackedLengths, softmax_scale: float
) -> torch.Tensor:
    """attention_varlen of sequences that are all new, for what takes_pack accepts; differentiable once.

    Args:
        q: [T, H, D]; T > 0.
        k: [T, KH, D], as v.
        softmax_scale: more than 0.
    Returns:
        [T, H, D].
    """
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return VarlenAttention.apply(q, k, v, lengths.varlen, softmax_scale, has_gradient)


def store_attended(found: torch.Tensor | QuantizedTensor, out: torch.Tensor | QuantizedTensor) -> None:
    """Copy [T, H, D], or codes where out is codes, to where attention_varlen puts it."""
    if isinstance(out, torch.Tensor):
        assert isinstance(found, torch.Tensor), "codes have a place for codes"
        out.copy_(found)
        return
    codes = found if isinstance(found, QuantizedTensor) else quantize(found.reshape(found.shape[0], -1), out.scaling)
    out.qdata.copy_(codes.qdata)
    out.scale.copy_(codes.scale)


def rows_of(out: torch.Tensor | QuantizedTensor, start: int, end: int) -> torch.Tensor | QuantizedTensor:
    """The place of some tokens in that of all."""
    if isinstance(out, torch.Tensor):
        return out[start:end]
    return QuantizedTensor(out.qdata[start:end], out.scale[start:end], out.scaling)


def empty_codes(num_tokens: int, width: int, scaling: Scaling, device: torch.device) -> QuantizedTensor:
    """A place for codes [T, H * D] of a scaling whose scales stay within a token."""
    codes = torch.empty(num_tokens, width, dtype=scaling.dtype, device=device)
    return QuantizedTensor(codes, empty_scale(num_tokens, width, scaling, device), scaling)


def empty_scale(num_tokens: int, width: int, scaling: Scaling, device: torch.device) -> torch.Tensor:
    """Their scale's: one group of all tokens after the other, as GEMMs take them."""
    rows, groups = scaling.scale_shape(num_tokens, width)
    return torch.empty(groups, rows, dtype=torch.float32, device=device).t()


def stores_codes(q: torch.Tensor, scaling: Scaling) -> bool:
    """Whether attention_varlen of such queries [T, H, D] stores codes without another pass."""
    if not _has_kernel(q):
        return False
    from octavo.ops.attention.varlen import triton

    return triton.can_quantize(scaling, q.shape[2])


def _has_kernel(q: torch.Tensor) -> bool:
    if not q.is_cuda or env.force_reference():
        return False
    from octavo.ops.attention.varlen import triton

    return triton.can_run(q)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: VarlenBatch, out: torch.Tensor | QuantizedTensor
) -> None:
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2] and not q.shape[1] % k.shape[1]
    if isinstance(out, torch.Tensor):
        fits = fits and out.shape == q.shape and out.is_contiguous()
    else:
        fits = fits and out.shape == (q.shape[0], q.shape[1] * q.shape[2]) and out.qdata.is_contiguous()
    if not fits:
        raise ShapeError(
            "attention_varlen takes q [T, H, D], k and v [Tk, KH, D] with H a multiple of KH, and a contiguous out "
            f"[T, H, D] or codes [T, H * D], got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            f"out {tuple(out.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"attention_varlen takes q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    batch.lengths.check(q.shape[0])
    batch.key_lengths.check(k.shape[0])
