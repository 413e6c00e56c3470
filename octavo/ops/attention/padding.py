"""Packed sequences: what host and device know of their lengths, and the way to a padded batch and back."""

import dataclasses
import functools
import itertools

import torch

from octavo.errors import ShapeError
from octavo.ops._runtime.to_device import to_device


@dataclasses.dataclass(frozen=True)
class PackedLengths:
    """Sequences that lie one after the other, measured once for all layers: nothing here waits for a GPU.

    Attributes:
        cu_seqlens: [B+1] int32, cumulative lengths from 0, on the tokens' device.
        num_tokens: T.
        num_sequences: B.
        max_len: tokens of the longest of them.
        is_equal: every sequence has max_len tokens.
    """

    cu_seqlens: torch.Tensor
    num_tokens: int
    num_sequences: int
    max_len: int
    is_equal: bool

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> "PackedLengths":
        """Known on the host: no wait for the device.

        Args:
            lengths: tokens of each sequence, 0 allowed.
        """
        if any(n < 0 for n in lengths):
            raise ShapeError(f"lengths must not be negative, got {lengths}")
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()
        longest = max(lengths, default=0)
        is_equal = all(n == longest for n in lengths)
        on_device = to_device(cu_seqlens, torch.device(device))
        return cls(on_device, sum(lengths), len(lengths), longest, is_equal)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor) -> "PackedLengths":
        """From cumulative lengths; on a GPU this waits for it, once.

        Args:
            cu_seqlens: [B+1] int, rising from 0.
        """
        ends = cu_seqlens.reshape(-1).tolist()
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        if not ends or ends[0] != 0 or any(n < 0 for n in lengths):
            raise ShapeError(f"cu_seqlens must rise from 0, got {ends}")
        longest = max(lengths, default=0)
        is_equal = all(n == longest for n in lengths)
        return cls(cu_seqlens.reshape(-1).int().contiguous(), ends[-1], len(lengths), longest, is_equal)

    @classmethod
    def of(cls, cu_seqlens: "torch.Tensor | PackedLengths") -> "PackedLengths":
        """What is measured already, or from_cu_seqlens."""
        return cu_seqlens if isinstance(cu_seqlens, PackedLengths) else cls.from_cu_seqlens(cu_seqlens)

    @functools.cached_property
    def padded(self) -> "PaddedLayout":
        """Where each token sits in a padded batch."""
        return PaddedLayout.from_cu_seqlens(self.cu_seqlens, self.num_tokens, self.max_len)

    def check(self, num_tokens: int) -> None:
        """Raise ShapeError unless these are the lengths of num_tokens tokens."""
        if num_tokens != self.num_tokens:
            raise ShapeError(f"cu_seqlens must end with the number of tokens {num_tokens}, got {self.num_tokens}")


@dataclasses.dataclass(frozen=True)
class PaddedLayout:
    """Where each packed token sits in a padded [B, L] batch.

    Attributes:
        sequence: [T] int64, the token's row.
        offset: [T] int64, the token's column.
        batch: B.
        length: L.
    """

    sequence: torch.Tensor
    offset: torch.Tensor
    batch: int
    length: int

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, num_tokens: int, max_len: int | None = None) -> "PaddedLayout":
        """Layout of sequences that lie one after the other.

        Args:
            cu_seqlens: [B+1] int, starting with 0, ending with num_tokens.
            max_len: the longest, where it is known; None asks the device and waits for it.
        """
        cu = cu_seqlens.long()
        lengths = cu[1:] - cu[:-1]
        sequence = torch.repeat_interleave(
            torch.arange(len(lengths), device=cu.device), lengths, output_size=num_tokens
        )
        offset = torch.arange(num_tokens, device=cu.device) - cu[sequence]
        if max_len is None:
            max_len = int(lengths.max()) if len(lengths) else 0
        return cls(sequence, offset, len(lengths), max_len)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [B, L, ...], zeros where there is no token."""
        out = x.new_zeros((self.batch, self.length, *x.shape[1:]))
        out[self.sequence, self.offset] = x
        return out

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, ...] -> [T, ...]."""
        return x[self.sequence, self.offset]
