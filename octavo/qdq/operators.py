"""Explicit quantize and dequantize, as a model's author writes them: opaque to torch.export, rewritten by `fuse`.

A tensor of any rank counts as a matrix whose last dim is the columns; scales decode, as everywhere in octavo.
"""

import math

import torch

from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.numerics.formats import format_of
from octavo.numerics.quantized import expand_scale
from octavo.numerics.scaling import INPUT_DTYPES, Scaling, encode, reciprocal
from octavo.ops import quantize as quantizer
from octavo.ops._runtime.registry import register

KINDS = ("per_tensor", "per_row", "block_1x128", "block_128x128")
DYNAMIC_KINDS = ("per_tensor", "per_row", "block_1x128")


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | float,
    *,
    kind: str = "per_tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Codes of x under a known scale: round_to_nearest_even(saturate(x * (1 / scale))), 1 / scale rounded to fp32.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        scale: fp32, of one element per tensor, [rows, 1] per row, [ceil(rows/bm), ceil(K/128)] for blocks, where rows
            is the product of the leading dims; or a positive number.
        kind: one of KINDS.
        dtype: float8_e4m3fn or float8_e5m2.
    Returns:
        x's shape, dtype.
    Raises:
        ShapeError: a scale of another shape.
        DtypeError: another dtype of x, scale or dtype.
        RecipeError: another kind.
    Exactness: bitwise on every device; a code saturates and never becomes NaN but from NaN.
    """
    scale = _as_scale(scale, x)
    _check(x, scale, kind)
    if x.dtype not in INPUT_DTYPES:
        raise DtypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}; cast it before quantizing")
    format_of(dtype)
    codes: torch.Tensor = _quantize_op(x, scale, kind, dtype)
    return codes


def quantize_dynamic(
    x: torch.Tensor, *, kind: str = "per_row", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x and the scale that its own amax gives (docs/numerics.md), for `dequantize`.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        kind: one of DYNAMIC_KINDS.
        dtype: float8_e4m3fn or float8_e5m2.
    Returns:
        (codes of x's shape, fp32 scale: [1, 1] per tensor, [rows, 1] per row, [rows, ceil(K/128)] for blocks).
    Errors and exactness as quantize.
    """
    if kind not in DYNAMIC_KINDS:
        raise RecipeError(f"a dynamic kind must be one of {DYNAMIC_KINDS}, got {kind!r}")
    if x.dim() == 0 or x.dtype not in INPUT_DTYPES:
        raise DtypeError(f"x must be [..., K] float32, bfloat16 or float16, got {tuple(x.shape)} {x.dtype}")
    format_of(dtype)
    codes, scale = _dynamic_op(x, kind, dtype)
    return codes, scale


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor | float,
    *,
    kind: str = "per_tensor",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """codes * scale in fp32, rounded once.

    Args:
        codes: [..., K] float8_e4m3fn or float8_e5m2.
        scale: as in quantize.
        kind: as in quantize.
        dtype: of the result, float32, bfloat16 or float16.
    Returns:
        codes' shape, dtype.
    Errors and exactness as quantize.
    """
    scale = _as_scale(scale, codes)
    _check(codes, scale, kind)
    format_of(codes.dtype)
    if dtype not in INPUT_DTYPES:
        raise DtypeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    out: torch.Tensor = _dequantize_op(codes, scale, kind, dtype)
    return out


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [rows, K]."""
    return x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)


def encode_blocks(x: torch.Tensor, scale: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The reference of quantize: x [..., K] -> codes of x's shape."""
    matrix = as_matrix(x)
    wide = expand_scale(reciprocal(shaped(scale, kind)), Scaling.of_kind(kind, dtype).block_size, matrix.shape)
    return encode(matrix, wide, dtype).reshape(x.shape)


def decode_blocks(codes: torch.Tensor, scale: torch.Tensor, kind: str, out_dtype: torch.dtype) -> torch.Tensor:
    """The reference of dequantize."""
    matrix = as_matrix(codes)
    wide = expand_scale(shaped(scale, kind), Scaling.of_kind(kind, codes.dtype).block_size, matrix.shape)
    return (matrix.float() * wide).to(out_dtype).reshape(codes.shape)


def encode_dynamic(x: torch.Tensor, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_dynamic by octavo's quantizer, on any device."""
    q = quantizer.quantize(as_matrix(x), Scaling.of_kind(kind, dtype))
    return q.qdata.reshape(x.shape), q.scale


def encode_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """quantize per tensor by octavo's quantizer, one kernel on a GPU."""
    matrix = as_matrix(x)
    known = reciprocal(scale.float())
    return quantizer.quantize(matrix, Scaling.per_tensor(dtype), quant_scale=known).qdata.reshape(x.shape)


def _fake_dynamic(x: torch.Tensor, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    num_rows, num_cols = Scaling.of_kind(kind, dtype).scale_shape(rows, cols)
    scale = x.new_empty((num_rows, num_cols), dtype=torch.float32)
    if kind == "block_1x128":
        scale = x.new_empty((num_cols, num_rows), dtype=torch.float32).t()  # strides (1, rows), as quantize lays it out
    return x.new_empty(x.shape, dtype=dtype), scale


def _as_scale(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale
    if not (scale > 0.0 and math.isfinite(scale)):
        raise RecipeError(f"scale must be a positive finite number, got {scale}")
    return torch.full((), scale, dtype=torch.float32, device=like.device)


def _check(x: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    if kind not in KINDS:
        raise RecipeError(f"kind must be one of {KINDS}, got {kind!r}")
    if scale.dtype != torch.float32:
        raise DtypeError(f"scale must be float32, got {scale.dtype}; keep it out of model.to(dtype)")
    if kind == "per_tensor":
        expected, is_right = "one element", scale.numel() == 1
    else:
        shape = Scaling.of_kind(kind).scale_shape(math.prod(x.shape[:-1]), x.shape[-1])
        expected, is_right = f"shape {shape}", tuple(scale.shape) == shape
    if not is_right:
        raise ShapeError(f"the {kind} scale of {tuple(x.shape)} must have {expected}, got shape {tuple(scale.shape)}")


def shaped(scale: torch.Tensor, kind: str) -> torch.Tensor:
    """A scale in the shape that QuantizedTensor has it."""
    return scale.reshape(1, 1) if kind == "per_tensor" else scale


_quantize_op = register(
    "qdq_quantize(Tensor x, Tensor scale, str kind, ScalarType dtype) -> Tensor",
    reference=encode_blocks,
    fake=lambda x, scale, kind, dtype: x.new_empty(x.shape, dtype=dtype),
    cuda=lambda x, scale, kind, dtype: (
        encode_static(x, scale, dtype) if kind == "per_tensor" else encode_blocks(x, scale, kind, dtype)
    ),
)
_dynamic_op = register(
    "qdq_quantize_dynamic(Tensor x, str kind, ScalarType dtype) -> (Tensor, Tensor)",
    reference=encode_dynamic,
    fake=_fake_dynamic,
    cuda=encode_dynamic,
)
_dequantize_op = register(
    "qdq_dequantize(Tensor codes, Tensor scale, str kind, ScalarType out_dtype) -> Tensor",
    reference=decode_blocks,
    fake=lambda codes, scale, kind, out_dtype: codes.new_empty(codes.shape, dtype=out_dtype),
    cuda=decode_blocks,
)
