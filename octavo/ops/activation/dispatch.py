"""The fused activation ops in torch.library: one kernel on a GPU where it exists, else the ops one after the other."""

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import register
from octavo.ops.activation import reference
from octavo.ops.quantize import empty_operand, scaling_of

MaybeTensor = torch.Tensor | None


def _parts(q: QuantizedTensor | None, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale; two empty tensors for none, as an op's number of results is fixed."""
    return (like.new_empty(0), like.new_empty(0, dtype=torch.float32)) if q is None else (q.qdata, q.scale)


def _quantize(
    x: torch.Tensor,
    bias: MaybeTensor,
    quant_scale: MaybeTensor,
    amax_out: MaybeTensor,
    kind: str,
    scaling: str,
    column_scaling: str,
    store_scaling: str,
) -> tuple[torch.Tensor, ...]:
    rows, columns, stored = Scaling.of_text(scaling), scaling_of(column_scaling), scaling_of(store_scaling)
    width = x.shape[1] // (2 if kind == "swiglu" else 1)
    run = reference.activation_quantize
    if x.is_cuda and not env.force_reference():
        from octavo.ops.activation import triton

        if triton.can_fuse(x, width, rows, columns) and (
            columns is None or triton.fits_register_tile(rows, columns, x)
        ):
            run = triton.activation_quantize
    results = run(x, kind, bias, rows, columns, quant_scale, amax_out, stored)
    return tuple(part for q in results for part in _parts(q, x))


def _backward(
    grad: torch.Tensor,
    codes: torch.Tensor,
    scale: MaybeTensor,
    bias: MaybeTensor,
    quant_scale: MaybeTensor,
    amax_out: MaybeTensor,
    column_quant_scale: MaybeTensor,
    kind: str,
    scaling: str,
    column_scaling: str,
    store_scaling: str,
) -> tuple[torch.Tensor, ...]:
    grad_scaling, columns = Scaling.of_text(scaling), scaling_of(column_scaling)
    stored = codes if scale is None else QuantizedTensor(codes, scale, Scaling.of_text(store_scaling))
    if kind == "swiglu" and columns is None and grad.is_cuda and not env.force_reference():
        from octavo.ops.activation import triton

        if isinstance(stored, QuantizedTensor) and triton.can_fuse_backward(grad, stored, grad_scaling):
            both = triton.swiglu_backward_quantize(grad, stored, grad_scaling, quant_scale, amax_out)
            return (*_parts(both[0], grad), *_parts(both[1], grad), grad.new_empty(0), *_parts(None, grad))
    forward_columns = None if columns is None else (columns, column_quant_scale)
    rows, cols, grad_bias, output = reference.activation_backward_quantize(
        grad, stored, kind, bias, grad_scaling, quant_scale, amax_out, forward_columns
    )
    bias_part = grad.new_empty(0) if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
    return (*_parts(rows, grad), *_parts(cols, grad), bias_part, *_parts(output, grad))


def _fake_quantize(  # type: ignore[no-untyped-def]
    x, bias, quant_scale, amax_out, kind, scaling, column_scaling, store_scaling
):
    T, width = x.shape
    F = width // 2 if kind == "swiglu" else width
    return (
        *empty_operand(x, scaling, T, F),
        *empty_operand(x, column_scaling, F, T),
        *empty_operand(x, store_scaling, T, width),
    )


def _fake_backward(  # type: ignore[no-untyped-def]
    grad, codes, scale, bias, quant_scale, amax_out, column_quant_scale, kind, scaling, column_scaling, store_scaling
):
    T, width = codes.shape
    grad_bias = grad.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return (
        *empty_operand(grad, scaling, T, width),
        *empty_operand(grad, scaling, width, T),
        grad_bias,
        *empty_operand(grad, column_scaling, grad.shape[1], T),
    )


quantize_op = register(
    "activation_quantize(Tensor x, Tensor? bias, Tensor? quant_scale, Tensor(a!)? amax_out, str kind, str scaling, "
    "str column_scaling, str store_scaling) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_quantize,
    fake=_fake_quantize,
    cuda=_quantize,
)
backward_op = register(
    "activation_backward_quantize(Tensor grad, Tensor codes, Tensor? scale, Tensor? bias, Tensor? quant_scale, "
    "Tensor(a!)? amax_out, Tensor? column_quant_scale, str kind, str scaling, str column_scaling, str store_scaling) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward,
    fake=_fake_backward,
    cuda=_backward,
)
