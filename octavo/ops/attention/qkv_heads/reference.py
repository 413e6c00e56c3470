"""The separate ops one after the other, forward and backward: the meaning of the fused kernels, on any device."""

import torch

from octavo.ops.attention import KVRounding, round_kv
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation
from octavo.ops.attention.rope import apply_rope
from octavo.ops.norm import has_exact_kernel, norm_backward, norm_forward
from octavo.ops.norm.reference import statistics
from octavo.ops.norm.rms_norm import rms_norm


def qkv_heads_reference(
    qkv: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    rotation: Rotation,
    norms: HeadNorms | None,
    rounding: KVRounding | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As octavo.ops.attention.qkv_heads.qkv_heads."""
    heads = qkv.unflatten(-1, (-1, head_dim))  # [T, H + 2 KH, D]
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    rstd = qkv.new_empty(0, dtype=torch.float32)
    if norms is not None:
        (q, q_rstd), (k, k_rstd) = _norm(q, norms.q_weight, norms), _norm(k, norms.k_weight, norms)
        rstd = torch.cat((q_rstd, k_rstd))
    positions, cos, sin, interleaved = rotation
    q, k = (apply_rope(x, positions, cos, sin, interleaved=interleaved) for x in (q, k))
    if rounding is not None:
        k, v = round_kv(k, rounding, 0), round_kv(v, rounding, 1)
    return q, k, v.clone(memory_format=torch.contiguous_format) if rounding is None else v, rstd


def _norm(x: torch.Tensor, weight: torch.Tensor, norms: HeadNorms) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of heads [T, H, D], and the [T * H] numbers that its backward takes."""
    rows = x.reshape(-1, x.shape[-1])
    if norms.exact and not has_exact_kernel(x):
        y, rstd = rms_norm(rows, weight, norms.eps, exact=True), statistics(rows, norms.eps, "rms_norm")[1]
    else:
        y, _, _, rstd = norm_forward(rows, weight, eps=norms.eps, kind="rms_norm")
    return y.view(x.shape), rstd


def qkv_heads_backward_reference(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    qkv: torch.Tensor | None,
    rstd: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    rotation: Rotation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As octavo.ops.attention.qkv_heads.qkv_heads_backward; the weights' gradients are empty where there are none."""
    positions, cos, sin, interleaved = rotation
    grads = [apply_rope(x, positions, cos, sin, interleaved=interleaved, back=True) for x in (grad_q, grad_k)]
    grad_weights = [rstd.new_empty(0), rstd.new_empty(0)]
    if weights is not None:
        assert qkv is not None, "norms need what they normed"
        sources = qkv.split([x.shape[1] * x.shape[2] for x in (grad_q, grad_k, grad_v)], dim=-1)
        rstds = rstd.split([x.shape[0] * x.shape[1] for x in grads])
        for i, grad in enumerate(grads):
            dim = grad.shape[-1]
            of_rows = (grad.reshape(-1, dim), sources[i].reshape(-1, dim), weights[i], None, rstds[i])
            grad_rows, grad_weights[i], _ = norm_backward(*of_rows, kind="rms_norm")
            grads[i] = grad_rows.view(grad.shape)
    return torch.cat([x.flatten(1) for x in (*grads, grad_v)], dim=-1), grad_weights[0], grad_weights[1]
