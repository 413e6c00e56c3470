"""Blocks of 128 elements as codes and scales in one uint8 buffer: what transport.py puts on the wire.

A buffer has pieces, one for each rank that sends or receives. A piece is its codes, its fp32 scales, and fp32 numbers
that travel as they are; it ends at a multiple of 16 bytes, so that quantizers can write into the next one.
"""

import dataclasses

import torch

from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.packed import decode_pieces, mark_non_finite, sum_pieces
from octavo.ops.quantize import quantize

BLOCK = 128
SCALING = Scaling.block_1x128()
_ALIGNMENT = 16  # bytes, of every quantizer's output


@dataclasses.dataclass(frozen=True)
class Packed:
    """Pieces of quantized elements.

    Attributes:
        buffer: [pieces, bytes] uint8, contiguous.
        numel: quantized elements of a piece, a multiple of 128.
        num_plain: fp32 numbers of a piece behind them.
    """

    buffer: torch.Tensor
    numel: int
    num_plain: int = 0

    @classmethod
    def empty(cls, num_pieces: int, numel: int, device: torch.device, num_plain: int = 0) -> "Packed":
        """A buffer whose bytes are unset; its first dimension is `num_pieces`.

        Raises:
            ShapeError: numel is no multiple of 128.
        """
        if numel % BLOCK:
            raise ShapeError(f"a piece must be whole blocks of {BLOCK}, got {numel} elements; pad it")
        num_bytes = numel + 4 * (numel // BLOCK + num_plain)
        shape = (num_pieces, max(-(-num_bytes // _ALIGNMENT), 1) * _ALIGNMENT)
        return cls(torch.empty(shape, dtype=torch.uint8, device=device), numel, num_plain)

    def empty_like(self, num_pieces: int) -> "Packed":
        """A buffer for another number of such pieces."""
        return Packed.empty(num_pieces, self.numel, self.buffer.device, self.num_plain)

    @property
    def codes(self) -> torch.Tensor:
        """[pieces, blocks, 128] float8_e4m3fn, a view."""
        return self.buffer[:, : self.numel].unflatten(1, (self.numel // BLOCK, BLOCK)).view(SCALING.dtype)

    @property
    def scales(self) -> torch.Tensor:
        """[pieces, blocks] fp32, a view; NaN for a block that held NaN or an infinity."""
        return self.buffer[:, self.numel : self.numel + self.numel // BLOCK * 4].view(torch.float32)

    @property
    def plain(self) -> torch.Tensor:
        """[pieces, num_plain] fp32, a view."""
        begin = self.numel + self.numel // BLOCK * 4
        return self.buffer[:, begin : begin + 4 * self.num_plain].view(torch.float32)

    def quantize_(self, x: torch.Tensor) -> "Packed":
        """Fill the codes and scales by the contract's quantizer, which writes them in place; returns self.

        Args:
            x: [pieces * numel] fp32 or bf16, contiguous.
        """
        pieces, codes, scales = x.view(self.codes.shape), self.codes, self.scales
        for piece, piece_codes, scale in zip(pieces, codes, scales, strict=True):
            quantize(piece, SCALING, out=QuantizedTensor.trusted(piece_codes, scale[:, None], SCALING))
        mark_non_finite(pieces, scales)
        return self

    def decode(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """codes * scale of all pieces, rounded to `dtype`: [pieces * numel]."""
        return decode_pieces(self.codes, self.scales, dtype)

    def sum(self) -> torch.Tensor:
        """The decoded pieces, added one after the other in fp32: [numel]."""
        return sum_pieces(self.codes, self.scales)
