"""GEMMs of ragged groups: rows sorted by group, one weight a group, and the weights' gradients.

Legend: E groups, R rows of all groups, N out, K in; offsets [E] int32 is where each group's rows end.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import register
from octavo.ops.gemm.grouped_mm import library
from octavo.ops.gemm.grouped_mm.reference import (
    gather_codes,
    grouped_mm_columns_reference,
    grouped_mm_reference,
    scaled_grouped_mm_columns_reference,
    scaled_grouped_mm_reference,
)

__all__ = ["Gather", "grouped_mm", "grouped_mm_columns", "scaled_grouped_mm", "scaled_grouped_mm_columns"]


class Gather(NamedTuple):
    """Which row of the operand each row of a batch is: row r is the operand's row slots[r] // slots_per_row.

    Attributes:
        slots: [R] int64.
        slots_per_row: how many slots one row of the operand has.
    """

    slots: torch.Tensor
    slots_per_row: int


def _mm_cuda(x, weights, offsets, out_dtype, exact):  # type: ignore[no-untyped-def]
    if env.force_reference():
        return grouped_mm_reference(x, weights, offsets, out_dtype, exact)
    from octavo.ops.gemm.grouped_mm import triton

    if triton.can_multiply_hp(x, weights) and (exact or triton.is_faster_hp(x, weights)):
        return triton.grouped_mm_exact(x, weights, offsets, out_dtype)
    if not exact and out_dtype == torch.bfloat16 and library.takes(x, weights):
        return library.grouped_mm(x, weights, offsets)
    return grouped_mm_reference(x, weights, offsets, out_dtype, exact)


def _columns_cuda(a, b, offsets, out_dtype):  # type: ignore[no-untyped-def]
    if out_dtype == torch.bfloat16 and library.takes(a, b) and not env.force_reference():
        return library.grouped_mm_columns(a, b, offsets)
    return grouped_mm_columns_reference(a, b, offsets, out_dtype)


def _unpack(a, a_scale, a_block, b, b_scale, b_block):  # type: ignore[no-untyped-def]
    left = QuantizedTensor(a, a_scale, Scaling(a.dtype, tuple(a_block)))
    scaling = Scaling(b[0].dtype, tuple(b_block))
    return left, [QuantizedTensor(codes, scale, scaling) for codes, scale in zip(b, b_scale, strict=True)]


def _scaled_cpu(  # type: ignore[no-untyped-def]
    a, a_scale, a_block, b, b_scale, b_block, offsets, slots, slots_per_row, out_dtype, exact, fast_accum
):
    left, weights = _unpack(a, a_scale, a_block, b, b_scale, b_block)
    rows = left if slots is None else gather_codes(left, slots, slots_per_row)
    return scaled_grouped_mm_reference(rows, weights, offsets, out_dtype, exact, fast_accum)


def _scaled_cuda(  # type: ignore[no-untyped-def]
    a, a_scale, a_block, b, b_scale, b_block, offsets, slots, slots_per_row, out_dtype, exact, fast_accum
):
    left, weights = _unpack(a, a_scale, a_block, b, b_scale, b_block)
    has_own_scales = left.scaling.block_size[0] == 1 and not weights[0].scaling.is_per_tensor
    if has_own_scales and not env.force_reference():
        from octavo.ops.gemm.grouped_mm import triton

        whole, num_groups = triton.stack(weights), offsets.shape[0]
        is_library = out_dtype == torch.bfloat16 and library.takes_rows(left, whole, num_groups)
        if is_library and not (exact or fast_accum):  # our sums are fast, and faster than the library's fast ones
            rows = left if slots is None else gather_codes(left, slots, slots_per_row)
            return library.scaled_grouped_mm(rows, whole, offsets)
        if triton.can_multiply(left, whole, num_groups):
            return triton.scaled_grouped_mm(left, whole, offsets, out_dtype, slots, slots_per_row)
    return _scaled_cpu(
        a, a_scale, a_block, b, b_scale, b_block, offsets, slots, slots_per_row, out_dtype, exact, fast_accum
    )


def _scaled_columns_cpu(  # type: ignore[no-untyped-def]
    a, a_scale, a_block, b, b_scale, b_block, offsets, out_dtype, fast_accum
):
    left, (right,) = _unpack(a, a_scale, a_block, [b], [b_scale], b_block)
    return scaled_grouped_mm_columns_reference(left, right, offsets, out_dtype, fast_accum)


def _scaled_columns_cuda(  # type: ignore[no-untyped-def]
    a, a_scale, a_block, b, b_scale, b_block, offsets, out_dtype, fast_accum
):
    left, (right,) = _unpack(a, a_scale, a_block, [b], [b_scale], b_block)
    if not env.force_reference():
        from octavo.ops.gemm.grouped_mm import triton

        if out_dtype == torch.bfloat16 and library.takes_codes(left, right):
            return library.scaled_grouped_mm_columns(left, right, offsets, fast_accum)
        if triton.can_multiply_columns(left, right):
            return triton.scaled_grouped_mm_columns(left, right, offsets, out_dtype)
    return scaled_grouped_mm_columns_reference(left, right, offsets, out_dtype, fast_accum)


def _fake_scaled(  # type: ignore[no-untyped-def]
    a, a_scale, a_block, b, b_scale, b_block, offsets, slots, slots_per_row, out_dtype, exact, fast_accum
):
    num_out = b[0].shape[0] // (offsets.shape[0] if len(b) == 1 else 1)
    return a.new_empty((a.shape[0] if slots is None else slots.shape[0], num_out), dtype=out_dtype)


def _fake_columns(a, b, offsets, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty((offsets.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


_mm = register(
    "grouped_mm(Tensor x, Tensor weights, Tensor offsets, ScalarType out_dtype, bool exact) -> Tensor",
    reference=grouped_mm_reference,
    fake=lambda x, weights, offsets, out_dtype, exact: x.new_empty((x.shape[0], weights.shape[1]), dtype=out_dtype),
    cuda=_mm_cuda,
)
_mm_columns = register(
    "grouped_mm_columns(Tensor a, Tensor b, Tensor offsets, ScalarType out_dtype) -> Tensor",
    reference=grouped_mm_columns_reference,
    fake=_fake_columns,
    cuda=_columns_cuda,
)
_scaled = register(
    "scaled_grouped_mm(Tensor a, Tensor a_scale, int[] a_block, Tensor[] b, Tensor[] b_scale, int[] b_block, "
    "Tensor offsets, Tensor? slots, int slots_per_row, ScalarType out_dtype, bool exact, bool fast_accum) -> Tensor",
    reference=_scaled_cpu,
    fake=_fake_scaled,
    cuda=_scaled_cuda,
)
_scaled_columns = register(
    "scaled_grouped_mm_columns(Tensor a, Tensor a_scale, int[] a_block, Tensor b, Tensor b_scale, int[] b_block, "
    "Tensor offsets, ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=_scaled_columns_cpu,
    fake=lambda a, _1, _2, b, _3, _4, offsets, out_dtype, _5: _fake_columns(a, b, offsets, out_dtype),
    cuda=_scaled_columns_cuda,
)


def grouped_mm(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Each group's rows times its own weight, in high precision.

    Args:
        x: [R, K], sorted by group.
        weights: [E, N, K] of x's dtype.
        offsets: [E] int32, ascending ends of the groups.
        out_dtype: None for x's.
        exact: the bits of a row depend on that row and its group's weight alone.
    Returns:
        [R, N] of out_dtype; rows past the last end are zero.
    Raises:
        ShapeError: sizes that do not fit.
    Exactness: exact=True bitwise hp_mm(exact=True) of the row; else as hp_mm. On a GPU bf16 stays on the device, in
        exact mode through a kernel of our own that takes fp16 too; all else waits for the offsets.
    """
    if x.dim() != 2 or weights.dim() != 3 or x.shape[1] != weights.shape[2] or weights.shape[0] != offsets.numel():
        raise ShapeError(
            f"x [R, K], weights [E, N, K] and offsets [E] must fit, got {tuple(x.shape)}, {tuple(weights.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    return _mm(x, weights, offsets, out_dtype or x.dtype, exact)


def grouped_mm_columns(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Each group's columns of a times those of b: the weights' gradients.

    Args:
        a: [N, R].
        b: [K, R], of a's dtype; any strides.
        offsets: [E] int32.
    Returns:
        [E, N, K] of out_dtype (None for a's), zero for a group without columns.
    Raises:
        ShapeError: unequal R.
    """
    _check_columns(tuple(a.shape), tuple(b.shape))
    return _mm_columns(a, b, offsets, out_dtype or a.dtype)


def scaled_grouped_mm(
    a: QuantizedTensor,
    weights: Sequence[QuantizedTensor],
    offsets: torch.Tensor,
    *,
    gather: Gather | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    exact: bool = False,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Each group's rows of codes times its own weight's codes.

    Args:
        a: [R, K], or with a gather what its rows are taken from.
        weights: one QuantizedTensor [N, K] a group, or a single one [E * N, K] of all, whose blocks do not cross from
            one group into the next. Scalings as in octavo.ops.gemm.scaled_mm.
        offsets: as in grouped_mm and scaled_mm.
        gather: where each of the R rows is in a; None for a itself.
        out_dtype: as in grouped_mm and scaled_mm.
        exact: as in grouped_mm and scaled_mm.
        fast_accum: as in grouped_mm and scaled_mm.
    Returns:
        [R, N] of out_dtype; rows past the last end are zero.
    Raises:
        ShapeError: sizes that do not fit, or a gather from blocks of several rows.
    Exactness: exact=True: a row's bits depend on that row and its group's weight alone; on a CPU they are those of
        scaled_mm(exact=True). Else as scaled_mm. On a GPU codes with a scale a row or a block stay on the device: E4M3
        with one scale a row without fast_accum through torch._scaled_grouped_mm, others, block scales and exact mode
        through kernels of our own, whose summed dimension is a multiple of 16. All else goes group by group, which
        waits for the offsets.
    """
    _check_weights(a, weights, offsets.numel())
    if gather is not None and a.scaling.block_size[0] > 1:
        raise ShapeError(f"rows are gathered from codes in blocks of one row, got {a.scaling.kind}; dequantize them")
    left = (a.qdata, a.scale, list(a.scaling.block_size))
    right = ([q.qdata for q in weights], [q.scale for q in weights], list(weights[0].scaling.block_size))
    return _scaled(*left, *right, offsets, *(gather or (None, 1)), out_dtype, exact, fast_accum)


def scaled_grouped_mm_columns(
    a: QuantizedTensor,
    b: QuantizedTensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Each group's columns of codes a times those of b: the weights' gradients.

    Args:
        a: [N, R].
        b: [K, R]. Blocks along R must end where groups do: pad groups to a multiple of the block.
        offsets: [E] int32.
    Returns:
        [E, N, K] of out_dtype, zero for a group without columns.
    Raises:
        ShapeError: unequal R.
    Exactness: as scaled_mm of each group.
    """
    _check_columns(tuple(a.shape), tuple(b.shape))
    left = (a.qdata, a.scale, list(a.scaling.block_size))
    right = (b.qdata, b.scale, list(b.scaling.block_size))
    return _scaled_columns(*left, *right, offsets, out_dtype, fast_accum)


def _check_weights(a: QuantizedTensor, weights: Sequence[QuantizedTensor], num_groups: int) -> None:
    shapes = [tuple(q.shape) for q in weights]
    is_whole = len(shapes) == 1 and shapes[0][0] % num_groups == 0
    is_apart = len(shapes) == num_groups and all(shape == shapes[0] for shape in shapes)
    if not (is_whole or is_apart) or shapes[0][1] != a.shape[1]:
        raise ShapeError(
            f"a [R, K] and the codes of {num_groups} weights [N, K] (or all as one) must fit, got {tuple(a.shape)} and "
            f"{len(shapes)} of shapes {sorted(set(shapes))}"
        )


def _check_columns(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[1] != b_shape[1]:
        raise ShapeError(f"a [N, R] and b [K, R] must agree in R, got {a_shape} and {b_shape}")
