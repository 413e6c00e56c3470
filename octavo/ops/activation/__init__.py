"""Activations (SwiGLU, bias + GeLU) alone and fused with quantization: equal in bits to the ops one after the other."""

from typing import NamedTuple

import torch

from octavo.errors import ConfigError, RecipeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling, check_matrix
from octavo.ops.activation import dispatch, reference
from octavo.ops.activation.gelu import check_bias
from octavo.ops.activation.reference import ForwardColumns
from octavo.ops.quantize import check_scales, text_of

__all__ = [
    "KINDS",
    "ActivationGradients",
    "ActivationQuantized",
    "activation",
    "activation_backward",
    "activation_backward_quantize",
    "activation_quantize",
]

KINDS = ("swiglu", "gelu")


class ActivationQuantized(NamedTuple):
    """rows [T, F] and, where asked for, columns [F, T] of the activation and `stored`, its input in FP8."""

    rows: QuantizedTensor
    columns: QuantizedTensor | None
    stored: QuantizedTensor | None


class ActivationGradients(NamedTuple):
    """rows and columns (transposed) of the gradient in x's place; grad_bias [F]; forward_columns [F, T]."""

    rows: QuantizedTensor
    columns: QuantizedTensor
    grad_bias: torch.Tensor | None
    forward_columns: QuantizedTensor | None


def activation(x: torch.Tensor, *, kind: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The activation alone, in fp32 with one rounding.

    Args:
        x: [T, 2F] for "swiglu" (gate half first), [T, F] for "gelu" (tanh form); fp32, bf16 or fp16.
        kind: one of KINDS.
        bias: [F] or None, added to x in fp32; gelu only.
    Returns:
        [T, F] of x's dtype.
    Raises:
        ShapeError: for other shapes.
        DtypeError: for other dtypes.
        ConfigError: for other kinds.
    Exactness: bitwise within a device; across devices SQNR >= 50 dB in bf16.
    """
    _check(x, kind, bias)
    return reference.activation(x, kind, bias)


def activation_backward(
    grad: torch.Tensor,
    stored: torch.Tensor | QuantizedTensor,
    *,
    kind: str,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of activation.

    Args:
        grad: [T, F].
        stored: the forward's x, or x in FP8, which is decoded in fp32.
        kind: the forward's.
        bias: the forward's.
    Returns:
        (gradient in x's place, of grad's dtype; gradient of bias, of bias's dtype, or None): the second is the sum of
        the first over the tokens, in an order that depends on the shape alone.
    Errors and exactness as activation.
    """
    _check(stored, kind, bias, grad)
    return reference.activation_backward(grad, stored, kind, bias)


def activation_quantize(
    x: torch.Tensor,
    *,
    kind: str,
    bias: torch.Tensor | None = None,
    scaling: Scaling,
    column_scaling: Scaling | None = None,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    store_scaling: Scaling | None = None,
) -> ActivationQuantized:
    """activation, then quantize (or quantize_both), and quantize of x itself, without the activation in memory.

    Args:
        x: as in activation.
        kind: as in activation.
        bias: as in activation.
        scaling: of the rows.
        column_scaling: of the columns; None makes no columns.
        quant_scale: a known quant_scale, as in quantize.
        amax_out: where the activation's amax is folded, as in quantize.
        store_scaling: of an FP8 copy of x for the backward, in 1x128 blocks; None makes none.
    Returns:
        ActivationQuantized.
    Raises:
        RecipeError: for a store_scaling of other blocks.
        ShapeError: as activation, quantize.
        DtypeError: as activation, quantize.
        ConfigError: as activation, quantize.
    Exactness: bitwise equal to the separate ops on the same device.
    """
    _check(x, kind, bias)
    check_scales(quant_scale, amax_out, *([scaling] if column_scaling is None else [scaling, column_scaling]))
    _check_saved(store_scaling)
    texts = [text_of(s) for s in (scaling, column_scaling, store_scaling)]
    out = dispatch.quantize_op(x, bias, quant_scale, amax_out, kind, *texts)
    columns = None if column_scaling is None else QuantizedTensor(out[2], out[3], column_scaling)
    stored = None if store_scaling is None else QuantizedTensor(out[4], out[5], store_scaling)
    return ActivationQuantized(QuantizedTensor(out[0], out[1], scaling), columns, stored)


def activation_backward_quantize(
    grad: torch.Tensor,
    stored: torch.Tensor | QuantizedTensor,
    *,
    kind: str,
    bias: torch.Tensor | None = None,
    scaling: Scaling,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    forward_columns: ForwardColumns | None = None,
) -> ActivationGradients:
    """activation_backward, then quantize_both of the gradient in x's place.

    Args:
        grad: as in activation_backward.
        stored: as in activation_backward.
        kind: as in activation_backward.
        bias: as in activation_backward.
        scaling: of the gradient's rows and columns.
        quant_scale: as in quantize_both.
        amax_out: as in quantize_both.
        forward_columns: (scaling, known quant_scale or None): also quantize_columns of the activation, recomputed from
            `stored` and rounded to grad's dtype, so that it need not be saved.
    Returns:
        ActivationGradients.
    Errors and exactness as activation_quantize.
    """
    _check(stored, kind, bias, grad)
    check_scales(quant_scale, amax_out, scaling)
    column_scaling, column_quant_scale = (None, None) if forward_columns is None else forward_columns
    if column_scaling is not None:
        check_scales(column_quant_scale, None, column_scaling)
    store_scaling, codes, scale = None, stored, None
    if isinstance(stored, QuantizedTensor):
        _check_saved(stored.scaling)
        store_scaling, codes, scale = stored.scaling, stored.qdata, stored.scale
    texts = [text_of(s) for s in (scaling, column_scaling, store_scaling)]
    out = dispatch.backward_op(grad, codes, scale, bias, quant_scale, amax_out, column_quant_scale, kind, *texts)
    return ActivationGradients(
        QuantizedTensor(out[0], out[1], scaling),
        QuantizedTensor(out[2], out[3], scaling),
        None if bias is None else out[4],
        None if column_scaling is None else QuantizedTensor(out[5], out[6], column_scaling),
    )


def _check(
    x: torch.Tensor | QuantizedTensor, kind: str, bias: torch.Tensor | None, grad: torch.Tensor | None = None
) -> None:
    if kind not in KINDS:
        raise ConfigError(f"kind must be one of {KINDS}, got {kind!r}")
    shape = tuple(x.shape)
    if isinstance(x, torch.Tensor):
        check_matrix(x, "x")
    if kind == "swiglu":
        if shape[1] % 2:
            raise ShapeError(f"x must have an even last dim (gate and up halves), got {shape}")
        if bias is not None:
            raise ShapeError("swiglu takes no bias; add it in the linear before, or use kind='gelu'")
    else:
        check_bias(shape, bias)
    if grad is not None:
        check_matrix(grad, "grad")
        expected = (shape[0], shape[1] // 2 if kind == "swiglu" else shape[1])
        if tuple(grad.shape) != expected:
            raise ShapeError(f"grad must have shape {expected} for {kind} of {shape}, got {tuple(grad.shape)}")


def _check_saved(scaling: Scaling | None) -> None:
    if scaling is not None and scaling.kind != "block_1x128":
        raise RecipeError(f"an activation's input is saved in 1x128 blocks, got {scaling.kind}; use block_1x128")
