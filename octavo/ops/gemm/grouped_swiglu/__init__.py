"""The experts' gate and up, SwiGLU and the next GEMM's codes as one op: one kernel for few rows a group."""

from collections.abc import Sequence

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import register
from octavo.ops.gemm.grouped_mm import Gather
from octavo.ops.gemm.grouped_swiglu.reference import grouped_swiglu_reference
from octavo.ops.quantize import check_scales, empty_operand

__all__ = ["grouped_swiglu_quantize"]


def _run(  # type: ignore[no-untyped-def]
    a, a_scale, a_block, b, b_scale, b_block, offsets, slots, slots_per_row, quant_scale, scaling, dtype, exact, fast
):
    left = QuantizedTensor(a, a_scale, Scaling(a.dtype, tuple(a_block)))
    of_weights, made = Scaling(b[0].dtype, tuple(b_block)), Scaling.of_text(scaling)
    weights = [QuantizedTensor(codes, scale, of_weights) for codes, scale in zip(b, b_scale, strict=True)]
    if a.is_cuda and quant_scale is None and len(weights) == 1 and not env.force_reference():
        from octavo.ops.gemm.grouped_swiglu import triton

        if triton.can_fuse(left, weights[0], len(a if slots is None else slots), len(offsets), made):
            codes = triton.grouped_swiglu(left, weights[0], offsets, slots, slots_per_row, made, dtype)
            return codes.qdata, codes.scale
    gather = None if slots is None else Gather(slots, slots_per_row)
    codes = grouped_swiglu_reference(left, weights, offsets, gather, made, quant_scale, dtype, exact, fast)
    return codes.qdata, codes.scale


def _fake(  # type: ignore[no-untyped-def]
    a, a_scale, a_block, b, b_scale, b_block, offsets, slots, slots_per_row, quant_scale, scaling, dtype, exact, fast
):
    both = b[0].shape[0] // (offsets.shape[0] if len(b) == 1 else 1)
    return empty_operand(a, scaling, (a if slots is None else slots).shape[0], both // 2)


_op = register(
    "grouped_swiglu(Tensor a, Tensor a_scale, int[] a_block, Tensor[] b, Tensor[] b_scale, int[] b_block, "
    "Tensor offsets, Tensor? slots, int slots_per_row, Tensor? quant_scale, str scaling, ScalarType dtype, bool exact, "
    "bool fast_accum) -> (Tensor, Tensor)",
    reference=_run,
    fake=_fake,
    cuda=_run,
)


def grouped_swiglu_quantize(
    a: QuantizedTensor,
    weights: Sequence[QuantizedTensor],
    offsets: torch.Tensor,
    *,
    scaling: Scaling,
    gather: Gather | None = None,
    quant_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    exact: bool = False,
    fast_accum: bool = False,
) -> QuantizedTensor:
    """scaled_grouped_mm, then activation_quantize of its rows by SwiGLU.

    Args:
        a: as in scaled_grouped_mm.
        weights: as there, [2F, K] a group: gate's rows first.
        offsets: as there.
        scaling: of the codes.
        gather: as in scaled_grouped_mm.
        quant_scale: as in activation_quantize.
        dtype: which the product is rounded to before the activation.
        exact: as in scaled_grouped_mm.
        fast_accum: as there.
    Returns:
        QuantizedTensor [R, F]; rows past the last end are codes of zeros.
    Raises:
        ShapeError: sizes that do not fit.
    Exactness: with exact=True, or where all is in blocks, bitwise the two ops one after the other. On a GPU one kernel
        where few rows a group (16 on average) and their weights are in blocks; else the two ops.
    """
    both = weights[0].shape[0] // (offsets.numel() if len(weights) == 1 else 1)
    if both % 2:
        raise ShapeError(f"weights must have as many rows of gate as of up, got {both} a group")
    check_scales(quant_scale, None, scaling)
    left = (a.qdata, a.scale, list(a.scaling.block_size))
    right = ([q.qdata for q in weights], [q.scale for q in weights], list(weights[0].scaling.block_size))
    codes, scale = _op(
        *left, *right, offsets, *(gather or (None, 1)), quant_scale, scaling.text, dtype, exact, fast_accum
    )
    return QuantizedTensor(codes, scale, scaling)
