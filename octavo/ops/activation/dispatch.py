"""The fused activation ops in torch.library: one kernel on a GPU where it exists, else the ops one after the other."""

from functools import lru_cache

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import register
from octavo.ops.activation import reference

MaybeTensor = torch.Tensor | None


def text_of(scaling: Scaling | None) -> str:
    """A scaling as an op's argument; "" for none."""
    if scaling is None:
        return ""
    name = str(scaling.dtype).removeprefix("torch.")
    return f"{name} {scaling.kind} {scaling.scale_format} {scaling.amax_floor!r}"


@lru_cache(maxsize=256)
def _of_text(text: str) -> Scaling | None:
    if not text:
        return None
    name, kind, scale_format, floor = text.split()
    return Scaling.of_kind(kind, getattr(torch, name), scale_format=scale_format, amax_floor=float(floor))


def _needed(text: str) -> Scaling:
    scaling = _of_text(text)
    assert scaling is not None, "the op was called without a scaling"
    return scaling


def _parts(q: QuantizedTensor | None, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale; two empty tensors for none, as an op's number of results is fixed."""
    return (like.new_empty(0), like.new_empty(0)) if q is None else (q.qdata, q.scale)


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
    rows, columns, stored = _needed(scaling), _of_text(column_scaling), _of_text(store_scaling)
    width = x.shape[1] // (2 if kind == "swiglu" else 1)
    run = reference.activation_quantize
    if x.is_cuda and not env.force_reference():
        from octavo.ops.activation import triton

        if triton.can_fuse(x, width, rows, columns) and (columns is None or triton.can_hold(rows, columns, x)):
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
    grad_scaling, columns = _needed(scaling), _of_text(column_scaling)
    stored = codes if scale is None else QuantizedTensor(codes, scale, _needed(store_scaling))
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


def _empty(x: torch.Tensor, text: str, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale [rows, cols] in the layouts of quantize; two empty tensors for no scaling."""
    scaling = _of_text(text)
    if scaling is None:
        return x.new_empty(0), x.new_empty(0)
    num_rows, num_cols = scaling.scale_shape(rows, cols)
    scale = x.new_empty((num_rows, num_cols), dtype=torch.float32)
    if scaling.kind in ("block_1x128", "mx_1x32"):
        scale = x.new_empty((num_cols, num_rows), dtype=torch.float32).t()  # strides (1, rows)
    return x.new_empty((rows, cols), dtype=scaling.dtype), scale


def _fake_quantize(  # type: ignore[no-untyped-def]
    x, bias, quant_scale, amax_out, kind, scaling, column_scaling, store_scaling
):
    T, width = x.shape
    F = width // 2 if kind == "swiglu" else width
    return (
        *_empty(x, scaling, T, F),
        *_empty(x, column_scaling, F, T),
        *_empty(x, store_scaling, T, width),
    )


def _fake_backward(  # type: ignore[no-untyped-def]
    grad, codes, scale, bias, quant_scale, amax_out, column_quant_scale, kind, scaling, column_scaling, store_scaling
):
    T, width = codes.shape
    grad_bias = grad.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return (
        *_empty(grad, scaling, T, width),
        *_empty(grad, scaling, width, T),
        grad_bias,
        *_empty(grad, column_scaling, grad.shape[1], T),
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
