"""The scaled GEMM through libraries: cuBLASLt by torch.nn.functional.scaled_mm, or decoded fp32 products.

Same quantization as the reference, another order of sums. The layout rules of cuBLASLt on Hopper live here alone.
Legend: M tokens, N out, K in; a [M, K] and b [N, K] codes, both K-major.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo import env
from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import GEMM_PAIRS, Scaling, name_gemm_pairs

_RECIPES = {
    "per_tensor": F.ScalingType.TensorWise,
    "per_row": F.ScalingType.RowWise,
    "block_1x128": F.ScalingType.BlockWise1x128,
    "block_128x128": F.ScalingType.BlockWise128x128,
}
_ROW_WISE = F.ScalingType.RowWise
# 1x128 blocks times 128x128 ones: the library takes a multiple of 4 rows, and up to 28 of them have other bits than
# more would (measured with torch 2.11 on an H200). Other blocks get a multiple of 64 rows, other scales one of 16.
LEAST_ROWS, ROWS = 32, 4
# What F.scaled_mm calls in torch 2.11 to 2.13. Where it is there we call it, too: F.scaled_mm around it takes 16 us.
_SCALED_MM = (
    "aten::_scaled_mm_v2(Tensor self, Tensor mat2, Tensor[] scale_a, int[] recipe_a, int[] swizzle_a, "
    "Tensor[] scale_b, int[] recipe_b, int[] swizzle_b, Tensor? bias, ScalarType? out_dtype, int[] contraction_dim=[], "
    "bool use_fast_accum=False) -> Tensor"
)


def is_expected(op_name: str, schema: str) -> bool:
    """Whether this torch has an operator torch.NAME with exactly this schema."""
    packet = getattr(torch.ops.aten, op_name, None)
    return packet is not None and hasattr(torch, op_name) and str(packet.default._schema) == schema


_HAS_SCALED_MM = is_expected("_scaled_mm_v2", _SCALED_MM)


def decoded_mm(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Decode both operands to fp32 and multiply: any device, any scaling, any pair of formats.

    Returns:
        [M, N] of out_dtype.
    """
    with torch.autocast(a.qdata.device.type, enabled=False):
        out = a.dequantize() @ b.dequantize().t()
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


class GemmLayout(NamedTuple):
    """What the library takes in place of a product's operands: worked out once for their shapes and scalings.

    a_pad, b_pad: (rows, columns) to add to the codes. a_recipe, b_recipe: the library's names of the scalings;
    a_names, b_names: the same as its operator takes them.
    """

    is_decoded: bool  # nothing takes these operands
    is_block: bool
    a_pad: tuple[int, int]
    b_pad: tuple[int, int]
    a_recipe: "F.ScalingType"
    b_recipe: "F.ScalingType"
    a_names: tuple[int]
    b_names: tuple[int]


def check_operands(a_shape: torch.Size, a_scaling: Scaling, b_shape: torch.Size, b_scaling: Scaling) -> None:
    """Refuse operands of unequal K, and scalings that do not go together.

    Raises:
        ShapeError: unequal K, or scalings that do not go together.
    """
    if a_shape[1] != b_shape[1]:
        raise ShapeError(f"a [M, K] and b [N, K] must agree in K, got {tuple(a_shape)} and {tuple(b_shape)}")
    if (a_scaling.kind, b_scaling.kind) not in GEMM_PAIRS:
        raise ShapeError(f"no GEMM takes {a_scaling.kind} x {b_scaling.kind}; known pairs: {name_gemm_pairs()}")


def layout_of(a_shape: torch.Size, a_scaling: Scaling, b_shape: torch.Size, b_scaling: Scaling) -> GemmLayout:
    """The layout of one product, its operands checked."""
    return _layout_of(a_shape, a_scaling.text, b_shape, b_scaling.text)


@functools.lru_cache(maxsize=1024)
def _layout_of(a_shape: torch.Size, a_text: str, b_shape: torch.Size, b_text: str) -> GemmLayout:
    a_scaling, b_scaling = Scaling.of_text(a_text), Scaling.of_text(b_text)
    check_operands(a_shape, a_scaling, b_shape, b_scaling)
    is_block = a_scaling.block_size[1] == 128
    num_e5m2 = [a_scaling.dtype, b_scaling.dtype].count(torch.float8_e5m2)
    is_decoded = 0 in (*a_shape, *b_shape) or num_e5m2 > (0 if is_block else 1)
    quantum = 128 if is_block else 16
    a_recipe, b_recipe = _RECIPES[a_scaling.kind], _RECIPES[b_scaling.kind]
    if _ROW_WISE in (a_recipe, b_recipe):  # where one operand has a scale a row, so must the other
        a_recipe = b_recipe = _ROW_WISE
    added = -a_shape[0] % (64 if is_block else 16)
    if (a_scaling.kind, b_scaling.kind) == ("block_1x128", "block_128x128"):
        added = unpadded_rows(a_shape[0]) - a_shape[0]
    a_pad = (added, -a_shape[1] % quantum)
    b_pad = (-b_shape[0] % quantum, -b_shape[1] % quantum)
    names = ((a_recipe.value,), (b_recipe.value,))
    return GemmLayout(is_decoded, is_block, a_pad, b_pad, a_recipe, b_recipe, *names)


def unpadded_rows(rows: int) -> int:
    """The least M from this one on that the library takes of 1x128 blocks times 128x128 ones."""
    return max(LEAST_ROWS, rows + -rows % ROWS)


def scaled_mm_cuda(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool = False,
) -> torch.Tensor:
    """F.scaled_mm with explicit recipes; operands padded to what cuBLASLt takes, the result cut back.

    Zero-size products and what torch refuses (E5M2 x E5M2, E5M2 with block scales) are decoded.

    Returns:
        [M, N] of out_dtype.
    Raises:
        ShapeError: as check_operands.
    """
    layout = _layout_of(a.qdata.shape, a.scaling.text, b.qdata.shape, b.scaling.text)
    if layout.is_decoded:
        return decoded_mm(a, b, bias, out_dtype)
    a_codes, scale_a = _operand(a, layout.a_recipe, layout.a_pad)
    b_codes, scale_b = _operand(b, layout.b_recipe, layout.b_pad)
    in_epilogue = out_dtype == torch.bfloat16 and (bias is None or _adds_bias(bias, layout))
    out = _scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a,
        scale_b.t() if layout.b_recipe is _ROW_WISE else scale_b,  # [1, N]
        layout,
        bias if in_epilogue else None,
        torch.bfloat16 if in_epilogue else torch.float32,
        fast_accum and not layout.is_block,
    )
    if layout.a_pad[0] or layout.b_pad[0]:
        out = out[: a.qdata.shape[0], : b.qdata.shape[0]]  # [M, N]
    return out.contiguous() if in_epilogue else _finish(out, bias, out_dtype)


def _scaled_mm(
    a_codes: torch.Tensor,
    b_codes: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    layout: GemmLayout,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """F.scaled_mm."""
    if _HAS_SCALED_MM:
        names_a, names_b = layout.a_names, layout.b_names
        return torch._scaled_mm_v2(
            a_codes, b_codes, [scale_a], names_a, (), [scale_b], names_b, (), bias, out_dtype, (), fast_accum
        )
    options = {"bias": bias, "output_dtype": out_dtype, "use_fast_accum": fast_accum}
    return F.scaled_mm(a_codes, b_codes, scale_a, layout.a_recipe, scale_b, layout.b_recipe, **options)  # type: ignore[arg-type]


def is_plain(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, exact: bool, _: bool
) -> bool:
    """Whether a traced product is one call of the library, on the operands as they are: see plain_mm."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # a compiler has loaded it

    if exact or not a.qdata.is_cuda or env.force_reference() or out_dtype != torch.bfloat16:
        return False
    are_whole = a.scaling.kind == b.scaling.kind == "per_tensor"
    are_e5m2 = a.scaling.dtype == b.scaling.dtype == torch.float8_e5m2
    sizes = (*a.qdata.shape, *b.qdata.shape)
    fits = [statically_known_true(size % 16 == 0) and statically_known_true(size > 0) for size in sizes]
    return are_whole and not are_e5m2 and all(fits) and (bias is None or bias.dtype == torch.bfloat16)


def plain_mm(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, _: bool, fast_accum: bool
) -> torch.Tensor:
    """scaled_mm_cuda of such operands, with the same bits, for a compiler: code that it makes calls an op of torch in
    less time than one of octavo's."""
    return torch._scaled_mm(a.qdata, b.qdata.t(), a.scale, b.scale, bias, None, out_dtype, fast_accum)


def _adds_bias(bias: torch.Tensor, layout: GemmLayout) -> bool:
    """Whether the library's epilogue takes this bias: bf16, as long as the product is wide."""
    return bias.dtype == torch.bfloat16 and not layout.b_pad[0]


def _finish(out: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """An fp32 product, a cut one too, plus its bias, rounded once: contiguous, of out_dtype."""
    if bias is None:
        return out.to(out_dtype).contiguous()
    if out.is_cuda and not env.force_reference():
        from octavo.ops.gemm.scaled_mm import triton

        return triton.add_bias(out, bias, out_dtype)
    return (out + bias.float()).to(out_dtype).contiguous()


def pad(
    codes: torch.Tensor, scale: torch.Tensor | None, rows: int, cols: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes [M, K] with zeros in new columns, and anything in new rows, as no row of a product depends on another.

    Where the codes' memory goes on for so many rows, they are not copied.

    Args:
        scale: [M, 1] or [M, ceil(K / 128)] fp32, or None where rows have none of their own.
    Returns:
        (codes [rows, cols], scale [rows, ...] in strides (1, rows) or None).
    """
    M, K = codes.shape
    if cols > K:
        codes = F.pad(codes.view(torch.uint8), (0, cols - K, 0, rows - M)).view(codes.dtype)
    elif codes.stride() == (K, 1) and codes.untyped_storage().nbytes() >= codes.storage_offset() + rows * K:
        codes = codes.as_strided((rows, K), (K, 1))
    else:
        longer = codes.new_empty(rows, K)
        longer[:M].copy_(codes)
        codes = longer
    if scale is not None:
        longer = scale.new_empty(scale.shape[1], rows).t()
        longer[:M].copy_(scale)
        scale = longer
    return codes, scale


def _operand(
    q: QuantizedTensor, recipe: "F.ScalingType", missing: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """q's codes with so many more rows and columns, and its scale in strides and at an address that cuBLASLt takes."""
    codes, scale = q.qdata, q.scale
    rows = codes.shape[0] + missing[0]
    if missing != (0, 0):
        has_row_scales = missing[0] > 0 and q.scaling.block_size[0] == 1
        codes, longer = pad(codes, scale if has_row_scales else None, rows, codes.shape[1] + missing[1])
        scale = scale if longer is None else longer
    if scale.data_ptr() % 16:  # of some rows alone
        scale = scale.clone()
    if recipe is F.ScalingType.TensorWise:
        return codes, scale
    if recipe is F.ScalingType.BlockWise128x128:
        if scale.shape[1] % 4:
            scale = F.pad(scale, (0, -scale.shape[1] % 4), value=1.0)
        return codes, scale.contiguous().t()  # [roundup4(K/128), N/128]
    if q.scaling.kind == "per_tensor":  # the other operand has one scale a row
        return codes, scale.expand(rows, 1).contiguous()
    if recipe is _ROW_WISE:
        return codes, scale if scale.stride() == (1, 1) else scale.contiguous().as_strided((rows, 1), (1, 1))
    if scale.stride() != (1, rows):
        # Strides (1, M), as quantize lays them out; contiguous() would leave a single column's as they are.
        scale = scale.t().clone(memory_format=torch.contiguous_format).t()
    return codes, scale
