"""From a fused projection to attention without a cache: heads split, Q and K normed and rotated, K and V rounded.

Training and scoring run it, and its gradient; qkv_cache/ is the engine's. Legend: T tokens, H query heads, KH kv heads,
D head_dim.
"""

from typing import Any

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.ops._runtime.registry import register
from octavo.ops.attention import KVRounding
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation
from octavo.ops.attention.qkv_heads.reference import qkv_heads_backward_reference, qkv_heads_reference

__all__ = ["qkv_heads", "qkv_heads_backward", "qkv_heads_backward_reference", "qkv_heads_reference"]

MAX_DIM = 1024


def qkv_heads(
    qkv: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    rotation: Rotation,
    norms: HeadNorms | None = None,
    rounding: KVRounding | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a projection into heads, norm Q and K, rotate them, round K and V as the FP8 cache does.

    Args:
        qkv: [T, (H + 2 KH) * D] fp32, bf16 or fp16: all heads of Q, then K, then V.
        num_kv_heads: KH.
        head_dim: D.
        rotation: each token's position, and the tables.
        norms: RMSNorm of each head of Q and K before the rotation, or None.
        rounding: what the cache's codes and scales make of K and V; None leaves them.
    Returns:
        (q [T, H, D], k, v [T, KH, D] of qkv's dtype, rstd [T * H + T * KH] fp32 for the backward; without norms empty).
        With norms, whose backward keeps qkv, v is a view of it where nothing is rounded; else nothing holds qkv.
    Raises:
        ShapeError: a width that is no such projection.
    Exactness: bitwise equal to the norms, apply_rope and round_kv one after the other on the same device.
    """
    num_heads, rest = divmod(qkv.shape[1], head_dim)
    if rest or num_heads <= 2 * num_kv_heads:
        raise ShapeError(
            f"qkv must be [T, (H + 2 * {num_kv_heads}) * {head_dim}] for {num_kv_heads} kv heads of {head_dim}, got "
            f"{tuple(qkv.shape)}"
        )
    q_weight, k_weight, eps, exact = norms or (None, None, 0.0, False)
    scale, quant_scale = rounding or (None, None)
    rounds, has_v = rounding is not None, rounding is not None or norms is None
    q, k, v, rstd = _forward_op(
        qkv, num_kv_heads, head_dim, *rotation, q_weight, k_weight, eps, exact, has_v, rounds, scale, quant_scale
    )
    if not has_v:
        v = qkv[:, -num_kv_heads * head_dim :].unflatten(1, (num_kv_heads, head_dim))
    return q, k, v, rstd


def qkv_heads_backward(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    qkv: torch.Tensor | None,
    rstd: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    rotation: Rotation,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of qkv_heads; those of rounded K and V pass straight through.

    Args:
        grad_q: [T, H, D].
        grad_k: [T, KH, D].
        grad_v: [T, KH, D].
        qkv: [T, (H + 2 KH) * D], the forward's; not read without weights.
        rstd: the forward's.
        weights: [D] each, of the norms of Q and K; None for none.
        rotation: the forward's.
    Returns:
        (grad_qkv [T, (H + 2 KH) * D] in the gradients' dtype, grad_q_weight [D], grad_k_weight [D] in the weights'
        dtype or None).
    Exactness: grad_qkv has the bits of the separate ops; the weights' gradients are sums in a fixed order (on a GPU
        another than norm_backward's: SQNR).
    """
    q_weight, k_weight = weights or (None, None)
    source = None if weights is None else qkv
    grads = _backward_op(grad_q, grad_k, grad_v, source, rstd, q_weight, k_weight, *rotation)
    return (grads[0], None, None) if weights is None else grads


def _takes(x: torch.Tensor, dim: int, cos: torch.Tensor, interleaved: bool) -> bool:
    """Whether the kernels do: heads of a power of two that turn whole by halves, or by neighbours."""
    fits = interleaved or 2 * cos.shape[1] == dim
    return fits and dim & (dim - 1) == 0 and 16 <= dim <= MAX_DIM and x.numel() > 0 and not env.force_reference()


def _forward(qkv, kv_heads, dim, positions, cos, sin, interleaved, *rest):  # type: ignore[no-untyped-def]
    q_weight, k_weight, eps, exact, has_v, rounds, scale, quant_scale = rest
    norms = None if q_weight is None else HeadNorms(q_weight, k_weight, eps, exact)
    rounding = KVRounding(scale, quant_scale) if rounds else None
    rotation = Rotation(positions, cos, sin, interleaved)
    q, k, v, rstd = qkv_heads_reference(qkv, kv_heads, dim, rotation, norms, rounding)
    return q, k, v if has_v else qkv.new_empty(0), rstd


def _forward_cuda(qkv, kv_heads, dim, positions, cos, sin, interleaved, *rest):  # type: ignore[no-untyped-def]
    if not _takes(qkv, dim, cos, interleaved):
        return _forward(qkv, kv_heads, dim, positions, cos, sin, interleaved, *rest)
    from octavo.ops.attention.qkv_heads import triton

    return triton.qkv_heads(qkv, kv_heads, dim, positions, cos, sin, interleaved, *rest)


def _forward_fake(qkv, kv_heads, dim, positions, cos, sin, interleaved, q_weight, *rest):  # type: ignore[no-untyped-def]
    tokens, num_heads, has_v = qkv.shape[0], qkv.shape[1] // dim, rest[3]
    q, k, v = (qkv.new_empty(tokens, n, dim) for n in (num_heads - 2 * kv_heads, kv_heads, kv_heads))
    v = v if has_v else qkv.new_empty(0)
    num_normed = 0 if q_weight is None else tokens * (num_heads - kv_heads)
    return q, k, v, qkv.new_empty(num_normed, dtype=torch.float32)


def _backward(grad_q, grad_k, grad_v, qkv, rstd, q_weight, k_weight, *rotation):  # type: ignore[no-untyped-def]
    weights = None if q_weight is None else (q_weight, k_weight)
    return qkv_heads_backward_reference(grad_q, grad_k, grad_v, qkv, rstd, weights, Rotation(*rotation))


def _backward_cuda(grad_q, *rest):  # type: ignore[no-untyped-def]
    if not _takes(grad_q, grad_q.shape[2], rest[7], rest[9]):
        return _backward(grad_q, *rest)
    from octavo.ops.attention.qkv_heads import triton

    return triton.qkv_heads_backward(grad_q, *rest)


def _backward_fake(grad_q, grad_k, grad_v, qkv, rstd, q_weight, k_weight, *rest):  # type: ignore[no-untyped-def]
    num_heads = grad_q.shape[1] + grad_k.shape[1] + grad_v.shape[1]
    grad_qkv = grad_q.new_empty(grad_q.shape[0], num_heads * grad_q.shape[2])
    return grad_qkv, *(rstd.new_empty(0) if w is None else torch.empty_like(w) for w in (q_weight, k_weight))


_forward_op: Any = register(
    "qkv_heads(Tensor qkv, int num_kv_heads, int head_dim, Tensor positions, Tensor cos, Tensor sin, bool interleaved, "
    "Tensor? q_weight, Tensor? k_weight, float eps, bool exact, bool has_v, bool rounds_kv, Tensor? kv_scale, "
    "Tensor? kv_quant_scale) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_forward,
    fake=_forward_fake,
    cuda=_forward_cuda,
)
_backward_op: Any = register(
    "qkv_heads_backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor? qkv, Tensor rstd, Tensor? q_weight, "
    "Tensor? k_weight, Tensor positions, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor, Tensor)",
    reference=_backward,
    fake=_backward_fake,
    cuda=_backward_cuda,
)
