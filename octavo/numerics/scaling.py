"""How one operand is scaled: block shape, scale format, and the one rule from amax to scale that every side follows.

The rule is TransformerEngine's, to the bit (tests/golden). `scale` decodes; `quant_scale`, its reciprocal, encodes.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.numerics.formats import NAN_CODE, format_of

SCALE_FORMATS = ("fp32", "e8m0")
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = {
    "per_tensor": (-1, -1),
    "per_row": (1, -1),
    "block_1x128": (1, 128),
    "block_128x128": (128, 128),
    "mx_1x32": (1, 32),
}
# block shapes that a GEMM takes of its two operands
GEMM_PAIRS = {
    ("per_tensor", "per_tensor"),
    ("per_tensor", "per_row"),
    ("per_row", "per_tensor"),
    ("per_row", "per_row"),
    ("block_1x128", "block_128x128"),
    ("block_128x128", "block_1x128"),
    ("block_1x128", "block_1x128"),
}
_KINDS = {size: kind for kind, size in BLOCK_SIZES.items()}
_FP32_MAX = torch.finfo(torch.float32).max
_EXPONENT_MASK = -(1 << 23)  # keeps sign and exponent of an fp32, clears its mantissa


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How one matrix operand is quantized.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block_size: elements that share a scale, (rows, columns); -1 is the whole dimension.
            One of (-1, -1), (1, -1), (1, 128), (128, 128), (1, 32).
        scale_format: "fp32", or "e8m0" for power-of-two scales (still stored as fp32 values).
        amax_floor: lower bound of amax before the scale is made. Keep 0 for gradients: a floor erases small ones.

    Raises:
        DtypeError: for a dtype outside these.
        RecipeError: for a block size, scale format or floor outside these.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block_size: tuple[int, int] = (1, 128)
    scale_format: str = "fp32"
    amax_floor: float = 0.0

    if TYPE_CHECKING:  # made once, but no fields

        @property
        def kind(self) -> str:
            """The block shape's name: a key of BLOCK_SIZES."""

        @property
        def text(self) -> str:
            """A word a field, "float8_e4m3fn per_row fp32 0.0": an op's argument, and a key of caches."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise DtypeError(f"Scaling.dtype must be float8_e4m3fn or float8_e5m2, got {self.dtype}")
        object.__setattr__(self, "block_size", tuple(self.block_size))  # a list from a JSON file is as good
        if self.block_size not in _KINDS:
            raise RecipeError(f"block_size must be one of {sorted(_KINDS)}, got {self.block_size}")
        if self.scale_format not in SCALE_FORMATS:
            raise RecipeError(f"scale_format must be one of {SCALE_FORMATS}, got {self.scale_format!r}")
        is_number = isinstance(self.amax_floor, int | float)
        if not is_number or not (self.amax_floor >= 0.0 and math.isfinite(self.amax_floor)):
            raise RecipeError(f"amax_floor must be a finite number >= 0, got {self.amax_floor!r}")
        object.__setattr__(self, "amax_floor", float(self.amax_floor))  # 0 and 0.0 have one fingerprint
        object.__setattr__(self, "kind", _KINDS[self.block_size])
        words = (str(self.dtype).removeprefix("torch."), self.kind, self.scale_format, repr(self.amax_floor))
        object.__setattr__(self, "text", " ".join(words))

    @classmethod
    def of_kind(cls, kind: str, dtype: torch.dtype = torch.float8_e4m3fn, **fields: object) -> "Scaling":
        """The scaling named `kind` (a key of BLOCK_SIZES)."""
        if kind not in BLOCK_SIZES:
            raise RecipeError(f"unknown scaling {kind!r}; known: {', '.join(BLOCK_SIZES)}")
        return cls(dtype=dtype, block_size=BLOCK_SIZES[kind], **fields)  # type: ignore[arg-type]

    @classmethod
    def per_tensor(cls, dtype: torch.dtype = torch.float8_e4m3fn, **fields: object) -> "Scaling":
        """One scale for the whole tensor."""
        return cls.of_kind("per_tensor", dtype, **fields)

    @classmethod
    def per_row(cls, dtype: torch.dtype = torch.float8_e4m3fn, **fields: object) -> "Scaling":
        """One scale a row (per token for activations, per output channel for weights)."""
        return cls.of_kind("per_row", dtype, **fields)

    @classmethod
    def block_1x128(cls, dtype: torch.dtype = torch.float8_e4m3fn, **fields: object) -> "Scaling":
        """One scale for each 128 consecutive elements of a row."""
        return cls.of_kind("block_1x128", dtype, **fields)

    @classmethod
    def block_128x128(cls, dtype: torch.dtype = torch.float8_e4m3fn, **fields: object) -> "Scaling":
        """One scale for each 128 x 128 tile."""
        return cls.of_kind("block_128x128", dtype, **fields)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of_text(text: str) -> "Scaling":
        """The scaling with this text."""
        dtype, kind, scale_format, floor = text.split()
        return Scaling.of_kind(kind, getattr(torch, dtype), scale_format=scale_format, amax_floor=float(floor))

    @property
    def is_per_tensor(self) -> bool:
        return self.kind == "per_tensor"

    @property
    def is_square(self) -> bool:
        """Codes can be transposed: one scale, or blocks of as many rows as columns."""
        return self.block_size[0] == self.block_size[1]

    @property
    def fp8_max(self) -> float:
        """Largest finite value of the format: what amax is mapped to."""
        return format_of(self.dtype).max

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scale of a [rows, cols] operand: blocks along each dimension, ragged last blocks counted."""
        bm, bk = self.block_size
        return (1 if bm == -1 else -(-rows // bm), 1 if bk == -1 else -(-cols // bk))


def name_gemm_pairs() -> str:
    """GEMM_PAIRS, for an error."""
    return ", ".join(" x ".join(pair) for pair in sorted(GEMM_PAIRS))


def check_matrix(x: torch.Tensor, what: str) -> None:
    """Refuse what no quantizer takes: anything but a 2-D fp32, bf16 or fp16 tensor."""
    if x.dim() != 2:
        raise ShapeError(f"{what} must be a matrix [M, K], got shape {tuple(x.shape)}; flatten leading dims first")
    if x.dtype not in INPUT_DTYPES:
        raise DtypeError(f"{what} must be float32, bfloat16 or float16, got {x.dtype}; cast it before quantizing")


def check_known_scale(quant_scale: torch.Tensor, scaling: Scaling) -> None:
    """Refuse a known quant_scale that is not one number for a whole tensor."""
    if not scaling.is_per_tensor or quant_scale.numel() != 1:
        raise ShapeError(
            f"a known quant_scale is one number and goes with per_tensor scaling, got shape {tuple(quant_scale.shape)} "
            f"with {scaling.kind}"
        )


def to_blocks(x: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """View a matrix as blocks, padded with zeros where the last block is ragged.

    Args:
        x: [M, K].
    Returns:
        [M/bm, bm, K/bk, bk], same dtype.
    """
    rows, cols = x.shape
    bm = rows if block_size[0] == -1 else block_size[0]
    bk = cols if block_size[1] == -1 else block_size[1]
    num_rows = 1 if block_size[0] == -1 else -(-rows // bm)  # a whole dimension is one block, even where it is empty
    num_cols = 1 if block_size[1] == -1 else -(-cols // bk)
    pad_rows, pad_cols = num_rows * bm - rows, num_cols * bk - cols
    if pad_rows or pad_cols:
        x = torch.nn.functional.pad(x, (0, pad_cols, 0, pad_rows))
    return x.reshape(num_rows, bm, num_cols, bk)


def block_amax(x: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """max|x| of each block in fp32; NaN is ignored, as a GPU's max ignores it.

    Args:
        x: [M, K] fp32, bf16 or fp16.
    Returns:
        [ceil(M/bm), ceil(K/bk)] fp32.
    """
    blocks = to_blocks(x, block_size)
    if blocks.numel() == 0:
        return torch.zeros(blocks.shape[0], blocks.shape[2], dtype=torch.float32, device=x.device)
    return torch.nan_to_num(blocks.abs(), nan=0.0, posinf=math.inf).amax(dim=(1, 3)).float()


def largest_quant_scale(scaling: Scaling, input_dtype: torch.dtype) -> float:
    """What an overflowing quant_scale becomes: the largest finite fp32 per tensor, of the input's dtype for blocks."""
    return _FP32_MAX if scaling.is_per_tensor else torch.finfo(input_dtype).max


def compute_quant_scale(amax: torch.Tensor, scaling: Scaling, input_dtype: torch.dtype) -> torch.Tensor:
    """The contract's rule from amax to quant_scale.

    quant_scale = fp8_max / max(amax, amax_floor), one correctly rounded division; 1 where amax is zero or infinite;
    the largest finite value where the quotient overflows; cut down to a power of two for e8m0.

    Args:
        amax: fp32, any shape, >= 0, no NaN.
        input_dtype: dtype of the tensor that is quantized.
    Returns:
        fp32, amax's shape.
    Exactness: bitwise on every device.
    """
    floored = amax.clamp_min(scaling.amax_floor) if scaling.amax_floor > 0.0 else amax
    fp8_max = torch.full_like(floored, scaling.fp8_max)  # tensor / tensor: number / tensor rounds twice in torch
    quant_scale = fp8_max / floored
    quant_scale = torch.where(torch.isinf(quant_scale), largest_quant_scale(scaling, input_dtype), quant_scale)
    quant_scale = torch.where((floored == 0) | torch.isinf(floored), 1.0, quant_scale)
    return floor_to_power_of_two(quant_scale) if scaling.scale_format == "e8m0" else quant_scale


def floor_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Clear the mantissa of positive fp32 values: the largest power of two not above each normal value."""
    return (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)


def reciprocal(quant_scale: torch.Tensor) -> torch.Tensor:
    """1 / quant_scale, correctly rounded (torch.reciprocal and number / tensor are not, everywhere)."""
    return torch.ones_like(quant_scale) / quant_scale


def encode(x: torch.Tensor, quant_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """round_to_nearest_even(saturate(x * quant_scale)) as codes of `dtype`; every NaN becomes code 0x7F.

    Args:
        x: any shape, fp32 / bf16 / fp16.
        quant_scale: fp32, broadcastable to x.
    Returns:
        x's shape, dtype.
    """
    fp8_max = format_of(dtype).max
    scaled = x.float() * quant_scale
    codes = scaled.clamp(-fp8_max, fp8_max).to(dtype)  # clamp keeps NaN
    return torch.where(torch.isnan(scaled), NAN_CODE, codes.view(torch.uint8)).to(torch.uint8).view(dtype)
