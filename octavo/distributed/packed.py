"""Pieces of blocks as codes and scales in one uint8 buffer: what transport.py puts on the wire.

A buffer has a piece for each rank that sends or receives. A piece is its codes, its fp32 scales, and fp32 numbers that
travel as they are; it ends at a multiple of 16 bytes, so that kernels can move as many at once in the next one.
"""

import dataclasses
from collections.abc import Sequence

import torch

from octavo.ops.packed import BLOCK

_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Packed:
    """Pieces of quantized elements.

    Attributes:
        buffer: [pieces, bytes] uint8, contiguous.
        num_blocks: of a piece, 128 elements each.
        num_plain: fp32 numbers of a piece behind them.
    """

    buffer: torch.Tensor
    num_blocks: int
    num_plain: int = 0

    @classmethod
    def empty(cls, num_pieces: int, num_blocks: int, device: torch.device, num_plain: int = 0) -> "Packed":
        """A buffer whose bytes are unset."""
        num_bytes = num_blocks * (BLOCK + 4) + num_plain * 4
        shape = (num_pieces, max(-(-num_bytes // _ALIGNMENT), 1) * _ALIGNMENT)
        return cls(torch.empty(shape, dtype=torch.uint8, device=device), num_blocks, num_plain)

    def empty_like(self, num_pieces: int) -> "Packed":
        """A buffer for another number of such pieces."""
        return Packed.empty(num_pieces, self.num_blocks, self.buffer.device, self.num_plain)

    @property
    def codes(self) -> torch.Tensor:
        """[pieces, blocks, 128] float8_e4m3fn, a view."""
        codes = self.buffer[:, : self.num_blocks * BLOCK].unflatten(1, (self.num_blocks, BLOCK))
        return codes.view(torch.float8_e4m3fn)

    @property
    def scales(self) -> torch.Tensor:
        """[pieces, blocks] fp32, a view; NaN for a block that held NaN or an infinity."""
        return self.buffer[:, self.num_blocks * BLOCK : self.num_blocks * (BLOCK + 4)].view(torch.float32)

    @property
    def plain(self) -> torch.Tensor:
        """[pieces, num_plain] fp32, a view."""
        begin = self.num_blocks * (BLOCK + 4)
        return self.buffer[:, begin : begin + 4 * self.num_plain].view(torch.float32)

    def split(self, widths: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(codes, scales) of neighbouring parts of every piece, each of so many elements and blocks of its own."""
        sizes = [num_blocks(width) for width in widths]
        return list(zip(self.codes.split(sizes, dim=1), self.scales.split(sizes, dim=1), strict=True))


def num_blocks(numel: int) -> int:
    """Blocks that so many elements take, the last one ragged."""
    return -(-numel // BLOCK)
