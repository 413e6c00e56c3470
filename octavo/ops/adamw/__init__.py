"""One AdamW step of one parameter, in place, in one pass: moments in fp32, bf16 or FP8, masters in fp32 or 16 bits."""

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.adamw import reference
from octavo.ops.adamw.state import BLOCK, STATE_DTYPES, join_master, split_master

__all__ = ["BLOCK", "HYPER", "STATE_DTYPES", "adamw_step_", "join_master", "split_master"]

HYPER = ("decay", "step_size", "inv_sqrt_correction", "grad_scale", "step")  # the columns of `hyper`


_op = register(
    "adamw_step(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? exp_avg_scale, "
    "Tensor(e!)? exp_avg_sq_scale, Tensor(f!)? master, Tensor grad, Tensor hyper, float beta1, float beta2, "
    "float eps, int offset=0) -> ()",
    reference=reference.adamw_step,
    fake=lambda *_: None,
    cuda=kernel_or_reference("adamw.triton.adamw_step", reference.adamw_step),
)


def adamw_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    hyper: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    exp_avg_scale: torch.Tensor | None = None,
    exp_avg_sq_scale: torch.Tensor | None = None,
    master: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    """Update a parameter, its moments and its master in place.

    first = first * beta1 + g * (1 - beta1), second = second * beta2 + g**2 * (1 - beta2), g = grad * grad_scale,
    weight = weight * decay - step_size * first / (sqrt(second) * inv_sqrt_correction + eps).

    Args:
        param: any shape, fp32, bf16 or fp16.
        grad: param's shape, any of these dtypes.
        exp_avg: param's shape, contiguous: fp32, bf16, or float8_e4m3fn.
        exp_avg_sq: param's shape, contiguous: exp_avg's dtype, or uint8 (UE5M3) beside float8_e4m3fn.
        hyper: [5] fp32 on param's device, the columns HYPER: 1 - lr * weight_decay, lr / (1 - beta1**step),
            1 / sqrt(1 - beta2**step), a factor for the gradient, and the step (from 1), which seeds the rounding.
        exp_avg_scale: [ceil(n / 128)] fp32 decode scales of an 8-bit moment, else None.
        exp_avg_sq_scale: the same.
        master: fp32, or int16 (the 16 bits that a bf16 param lacks), param's shape; None: param is its own master,
            and a bf16 one is rounded stochastically.
        offset: the place of its first element, where param is a shard of a larger one: the bits of stochastic rounding
            are of an element's place in the whole. A multiple of 128 for 8-bit moments, whose blocks are of the whole.
    Raises:
        ShapeError: where the shapes do not fit each other.
        DtypeError: where the dtypes do not fit each other.
    Exactness: moments bitwise on CPU and GPU; weights within 2**-20 of their update a step (the GPU's root and
        quotient), and always bitwise on one device. An inf or NaN gradient is not looked for: it makes its weight NaN
        and ruins its block of moments, so the caller checks the gradients' norm first.
    """
    _check(param, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, master)
    if exp_avg_scale is not None and offset % BLOCK:
        raise ShapeError(f"a shard with 8-bit moments must begin at a multiple of {BLOCK} elements, got {offset}")
    if param.numel() == 0:
        return
    dense = param.detach().contiguous()
    _op(
        dense, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, master, grad.detach().contiguous(), hyper,
        beta1, beta2, eps, offset,
    )  # fmt: skip
    if not param.is_contiguous():
        param.detach().copy_(dense)
    elif not param.is_inference():
        torch.autograd.graph.increment_version(param)  # what caches copies of the weight looks at this


def _check(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_scale: torch.Tensor | None,
    exp_avg_sq_scale: torch.Tensor | None,
    master: torch.Tensor | None,
) -> None:
    tensors = {"grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != param.shape:
            raise ShapeError(f"{name} must have the parameter's shape {tuple(param.shape)}, got {tuple(tensor.shape)}")
    is_fp8 = exp_avg.dtype == STATE_DTYPES["fp8"]
    second_dtype = torch.uint8 if is_fp8 else exp_avg.dtype
    if exp_avg.dtype not in STATE_DTYPES.values() or exp_avg_sq.dtype != second_dtype:
        raise DtypeError(
            "moments must be fp32 both, bf16 both, or float8_e4m3fn and uint8, got "
            f"{exp_avg.dtype} and {exp_avg_sq.dtype}"
        )
    for scale in (exp_avg_scale, exp_avg_sq_scale):
        found = None if scale is None else tuple(scale.shape)
        expected = (-(-param.numel() // BLOCK),) if is_fp8 else None
        if found != expected:
            raise ShapeError(f"the scales of {exp_avg.dtype} moments must have shape {expected}, got {found}")
    if master is not None and (param.dtype, master.dtype) not in _MASTERS:
        raise DtypeError(
            f"the master of a {param.dtype} parameter must be fp32 (bf16, fp16) or int16 (bf16), got {master.dtype}"
        )


_MASTERS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.int16),
}
