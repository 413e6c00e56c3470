"""QuantizedTensor (codes + decode scale) and the reference quantizer: the ground truth of every kernel."""

import dataclasses

import torch

from octavo.errors import ShapeError
from octavo.numerics.scaling import (
    Scaling,
    block_amax,
    check_known_scale,
    check_matrix,
    compute_quant_scale,
    encode,
    reciprocal,
    to_blocks,
)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A matrix in 8 bits: x ~= qdata.float() * scale, block by block.

    Attributes:
        qdata: [M, K], the scaling's 8-bit dtype, contiguous.
        scale: fp32 decode scale, [ceil(M/bm), ceil(K/bk)] ([1, 1] per tensor, [M, 1] per row).
        scaling: how it was quantized.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    scaling: Scaling

    def __post_init__(self) -> None:
        expected = self.scaling.scale_shape(*self.qdata.shape)
        if tuple(self.scale.shape) != expected:
            raise ShapeError(
                f"scale of a {tuple(self.qdata.shape)} operand with {self.scaling.kind} must have shape {expected}, "
                f"got {tuple(self.scale.shape)}"
            )

    @classmethod
    def trusted(cls, qdata: torch.Tensor, scale: torch.Tensor, scaling: Scaling) -> "QuantizedTensor":
        """Of a scale whose shape was made by scaling.scale_shape, and so needs no check: a tenth of the CPU's time."""
        made = object.__new__(cls)
        fields = made.__dict__
        fields["qdata"], fields["scale"], fields["scaling"] = qdata, scale, scaling
        return made

    @property
    def shape(self) -> torch.Size:
        return self.qdata.shape

    @property
    def device(self) -> torch.device:
        return self.qdata.device

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.qdata.numel() + 4 * self.scale.numel()

    def expanded_scale(self) -> torch.Tensor:
        """The scale of every element.

        Returns:
            [M, K] fp32 (a broadcast view where the blocks allow one).
        """
        return expand_scale(self.scale, self.scaling.block_size, self.qdata.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """qdata * scale, computed in fp32 and rounded once.

        Returns:
            [M, K] of `dtype`.
        """
        scale, block_size = self.scale, self.scaling.block_size
        if block_size[1] != -1:  # one a row broadcasts
            scale = expand_scale(scale, block_size, self.qdata.shape)
        return (self.qdata.float() * scale).to(dtype)

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """Codes and scale on a device."""
        return QuantizedTensor(self.qdata.to(device), self.scale.to(device), self.scaling)

    def t(self) -> "QuantizedTensor":
        """The transposed operand, codes unchanged, as a contiguous copy.

        Raises:
            ShapeError: where blocks are not square: such codes must be made again from the source (quantize_columns).
        """
        if self.scaling.block_size[0] != self.scaling.block_size[1]:
            raise ShapeError(
                f"{self.scaling.kind} codes cannot be transposed: their scales run along rows; "
                "quantize the transposed source with quantize_columns"
            )
        codes = self.qdata.view(torch.uint8).t().contiguous().view(self.qdata.dtype)  # [K, M]
        return QuantizedTensor(codes, self.scale.t().contiguous(), self.scaling)


def expand_scale(scale: torch.Tensor, block_size: tuple[int, int], shape: torch.Size | tuple[int, int]) -> torch.Tensor:
    """Repeat block scales to one an element.

    Args:
        scale: [ceil(M/bm), ceil(K/bk)] fp32.
        shape: (M, K).
    Returns:
        [M, K] fp32.
    """
    rows, cols = shape
    bm, bk = block_size
    if bm not in (-1, 1):
        scale = scale.repeat_interleave(bm, dim=0)[:rows]
    if bk not in (-1, 1):
        scale = scale.repeat_interleave(bk, dim=1)[:, :cols]
    return scale.expand(rows, cols)


def quantize_reference(x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize a matrix by the contract (docs/numerics.md); device-free torch.

    Args:
        x: [M, K] fp32, bf16 or fp16, any strides.
        scaling: block shape, format, scale format, floor.
        quant_scale: a known quant_scale (delayed scaling), fp32 scalar; per tensor only. None: from x's own amax.
    Returns:
        QuantizedTensor of shape [M, K].
    Raises:
        ShapeError: if x is no matrix, or quant_scale is given for blocks.
        DtypeError: if x has another dtype.
    Exactness: bitwise equal on every device, and to TransformerEngine's quantizers.
    """
    check_matrix(x, "x")
    if quant_scale is None:
        quant_scale = compute_quant_scale(block_amax(x, scaling.block_size), scaling, x.dtype)
    else:
        check_known_scale(quant_scale, scaling)
        quant_scale = quant_scale.float().reshape(1, 1)
    rows, cols = x.shape
    blocks = to_blocks(x, scaling.block_size)  # [M/bm, bm, K/bk, bk]
    codes = encode(blocks, quant_scale[:, None, :, None], scaling.dtype).view(torch.uint8)
    padded = codes.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    qdata = padded[:rows, :cols].contiguous().view(scaling.dtype)
    return QuantizedTensor.trusted(qdata, reciprocal(quant_scale), scaling)
