"""RMSNorm and LayerNorm of packed tokens, forward and backward, on every device; rms_norm/ and layer_norm/ wrap them.

norm_quantize/ fuses the forward with the quantization of the next linear's input. T tokens, K hidden.
"""

from typing import Literal, NamedTuple

import torch

from octavo import env
from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor, expand_scale
from octavo.numerics.scaling import check_matrix
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.moe import ExpertRows
from octavo.ops.norm import reference

__all__ = ["NormKind", "Normed", "check_norm", "has_exact_kernel", "norm_backward", "norm_forward"]

NormKind = Literal["rms_norm", "layer_norm"]
KINDS = ("rms_norm", "layer_norm")
STORED_KINDS = ("per_row", "block_1x128", "mx_1x32")  # scalings whose scales are a row's own


class Normed(NamedTuple):
    """What a norm leaves.

    Attributes:
        y: [T, K] in x's dtype.
        summed: x + residual in x's dtype, with which the residual stream goes on; None without a residual.
        mean: [T] fp32; None for rms_norm.
        rstd: [T] fp32.
    """

    y: torch.Tensor
    summed: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


def has_exact_kernel(x: torch.Tensor) -> bool:
    """Whether norm_forward of x is itself exact: our kernel's sums have an order of their own, torch's need not.

    Exact mode then takes it too, and with it everything that is fused with it; on a CPU the order-free ops.
    """
    return x.is_cuda and not env.force_reference()


def check_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    residual: torch.Tensor | ExpertRows | None,
) -> None:
    """Refuse operands that do not fit together, by name."""
    check_matrix(x, "x")
    if kind not in KINDS:
        raise RecipeError(f"kind must be one of {KINDS}, got {kind!r}")
    if bias is not None and kind == "rms_norm":
        raise RecipeError("rms_norm has no bias; use kind='layer_norm', or drop the bias")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ShapeError(
                f"{name} must have shape {tuple(x.shape[-1:])} (the last dim of x), got {tuple(vector.shape)}"
            )
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    if residual is not None and residual.dtype != x.dtype:
        raise DtypeError(f"residual must have x's dtype {x.dtype}, got {residual.dtype}; cast one of them")


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    eps: float,
    kind: NormKind,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> Normed:
    """Residual add and norm of each row.

    Args:
        x: [T, K] fp32, bf16 or fp16; any T.
        residual: the same, or None; added first, in x's dtype.
        weight: [K].
        bias: [K] or None, layer_norm only.
        eps: added to the mean square (of the centred row).
        zero_centered_gamma: multiply by 1 + weight.
    Returns:
        Normed.
    Raises:
        ShapeError: shapes that do not fit together.
        DtypeError: dtypes that do not fit together.
        RecipeError: another kind, or rms_norm with a bias.
    Source:
        Zhang and Sennrich 2019; Ba, Kiros and Hinton 2016.
    Exactness: statistics and products in fp32, y rounded once; a row's bits depend on that row alone on a GPU; across
        devices SQNR.
    """
    check_norm(x, weight, bias, kind, residual)
    y, summed, mean, rstd = _forward_op(x, weight, bias, residual, eps, kind, zero_centered_gamma)
    return Normed(y, None if residual is None else summed, mean if kind == "layer_norm" else None, rstd)


def norm_backward(
    grad: torch.Tensor,
    stored: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    kind: NormKind,
    zero_centered_gamma: bool = False,
    grad_residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of a norm.

    Args:
        grad: [T, K], of y.
        stored: the norm's input [T, K] (x + residual where there was one), as it was or in FP8 with scales that run
            along rows.
        weight: [K].
        mean: [T] fp32 of the forward; None for rms_norm.
        rstd: [T] fp32 of the forward.
        grad_residual: [T, K] or None, the gradient that reaches x + residual past the norm; added to grad_x.
    Returns:
        (grad_x [T, K] in grad's dtype, grad_weight [K], grad_bias [K] or None for rms_norm; both in weight's dtype).
    Raises:
        ShapeError: shapes that do not fit together.
        DtypeError: dtypes that do not fit together.
        RecipeError: another kind or mean, or FP8 codes with other scales.
    Exactness: deterministic (sums over tokens in a fixed order, no atomics); across devices SQNR.
    """
    codes, scale, scaling = (stored, None, None)
    if isinstance(stored, QuantizedTensor):
        codes, scale, scaling = stored.qdata, stored.scale, stored.scaling
        check_stored_kind(scaling.kind)
    check_norm(grad, weight, None, kind, grad_residual)
    if codes.shape != grad.shape:
        raise ShapeError(f"stored must have the gradient's shape {tuple(grad.shape)}, got {tuple(codes.shape)}")
    if (mean is None) != (kind == "rms_norm"):
        raise RecipeError("mean goes with layer_norm and with it alone; pass what the forward returned")
    block = list(scaling.block_size) if scaling is not None else []
    grad_x, grad_weight, grad_bias = _backward_op(
        grad, codes, scale, weight, mean, rstd, grad_residual, zero_centered_gamma, block
    )
    return grad_x, grad_weight, None if mean is None else grad_bias


def check_stored_kind(kind: str) -> None:
    """Refuse scalings of a saved input whose scales are not a row's own."""
    if kind not in STORED_KINDS:
        raise RecipeError(f"a norm's input is saved in FP8 with one of {STORED_KINDS}, got {kind}")


def _decode(stored: torch.Tensor, scale: torch.Tensor | None, block: list[int]) -> torch.Tensor:
    return stored if scale is None else stored.float() * expand_scale(scale, (block[0], block[1]), stored.shape)


def _has_elements(x: torch.Tensor) -> bool:
    return x.numel() > 0


def _forward_fake(x, weight, bias, residual, eps, kind, zero_centered_gamma):  # type: ignore[no-untyped-def]
    rows = x.new_empty(x.shape[0], dtype=torch.float32)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = torch.empty_like(rows) if kind == "layer_norm" else rows.new_empty(0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), summed, mean, rows


def _backward_reference(grad, stored, scale, weight, mean, rstd, grad_residual, zero_centered_gamma, block):  # type: ignore[no-untyped-def]
    x = _decode(stored, scale, block)
    return reference.backward(grad, x, weight, mean, rstd, grad_residual, zero_centered_gamma)


def _backward_fake(grad, stored, scale, weight, mean, rstd, grad_residual, zero_centered_gamma, block):  # type: ignore[no-untyped-def]
    grad_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
    return grad_x, torch.empty_like(weight), weight.new_empty(0 if mean is None else weight.shape[0])


_forward_op = register(
    "norm_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, float eps, str kind, "
    "bool zero_centered_gamma) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.forward,
    fake=_forward_fake,
    cuda=kernel_or_reference("norm.triton.norm_forward", reference.forward, takes=_has_elements),
)
_backward_op = register(
    "norm_backward(Tensor grad, Tensor stored, Tensor? scale, Tensor weight, Tensor? mean, Tensor rstd, "
    "Tensor? grad_residual, bool zero_centered_gamma, int[] block) -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    cuda=kernel_or_reference("norm.triton.norm_backward", _backward_reference, takes=_has_elements),
)
