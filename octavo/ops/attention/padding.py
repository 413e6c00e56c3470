"""Packed sequences: what host and device know of their lengths, and the way to a padded batch and back."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch

from octavo.errors import ShapeError
from octavo.ops._runtime.to_device import to_device
from octavo.ops.attention.mixed import list_tiles

TILE_ROWS = 64  # queries of a program of the kernel for ragged sequences


@dataclasses.dataclass(frozen=True)
class PackedLengths:
    """Sequences that lie one after the other, measured once for all layers: nothing here waits for a GPU.

    Attributes:
        cu_seqlens: [B+1] int32, cumulative lengths from 0, on the tokens' device.
        num_tokens: T.
        num_sequences: B.
        max_len: tokens of the longest of them.
        is_equal: every sequence has max_len tokens.
        lengths: of each, as the host knows them.
    """

    cu_seqlens: torch.Tensor
    num_tokens: int
    num_sequences: int
    max_len: int
    is_equal: bool
    lengths: tuple[int, ...]

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> "PackedLengths":
        """Known on the host: no wait for the device.

        Args:
            lengths: tokens of each sequence, 0 allowed.
        """
        if any(n < 0 for n in lengths):
            raise ShapeError(f"lengths must not be negative, got {lengths}")
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()
        return cls._measured(to_device(cu_seqlens, torch.device(device)), lengths)

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
        # a copy: kernels must find the lengths that are read here, also after a write to the caller's tensor
        return cls._measured(cu_seqlens.reshape(-1).to(torch.int32, copy=True).contiguous(), lengths)

    @classmethod
    def _measured(cls, cu_seqlens: torch.Tensor, lengths: list[int]) -> "PackedLengths":
        longest = max(lengths, default=0)
        is_equal = all(n == longest for n in lengths)
        return cls(cu_seqlens, sum(lengths), len(lengths), longest, is_equal, tuple(lengths))

    @classmethod
    def of(cls, cu_seqlens: "torch.Tensor | PackedLengths") -> "PackedLengths":
        """What is measured already, or from_cu_seqlens."""
        return cu_seqlens if isinstance(cu_seqlens, PackedLengths) else cls.from_cu_seqlens(cu_seqlens)

    @property
    def varlen(self) -> "VarlenBatch":
        """For a kernel that takes ragged sequences: each one's tokens see its own up to themselves."""
        return VarlenBatch(self, self, self._own_tiles)

    @property
    def has_tiles(self) -> bool:
        """Whether varlen makes nothing: a graph that is recorded must not make what later calls read."""
        return "_own_tiles" in vars(self)

    @functools.cached_property
    def _own_tiles(self) -> torch.Tensor:
        counts = np.array(self.lengths, dtype=np.int64)
        return _tiles(np.zeros_like(counts), counts, self.cu_seqlens.device)

    @functools.cached_property
    def padded(self) -> "PaddedLayout":
        """Where each token sits in a padded batch."""
        return PaddedLayout.from_cu_seqlens(self.cu_seqlens, self.num_tokens, self.max_len)

    def check(self, num_tokens: int) -> None:
        """Raise ShapeError unless these are the lengths of num_tokens tokens."""
        if num_tokens != self.num_tokens:
            raise ShapeError(f"cu_seqlens must end with the number of tokens {num_tokens}, got {self.num_tokens}")


class VarlenBatch(NamedTuple):
    """Sequences of which each one's last tokens see all of its own up to themselves.

    Attributes:
        lengths: of the queries, on their device.
        key_lengths: of the keys, likewise, none shorter than its queries; lengths itself where all are new.
        tiles: [N, 2] int32, likewise: (sequence, first query) of every TILE_ROWS queries, those of most keys first.
    """

    lengths: PackedLengths
    key_lengths: PackedLengths
    tiles: torch.Tensor

    @classmethod
    def of(cls, spans: list[tuple[int, int]], device: torch.device) -> "VarlenBatch":
        """Of sequences that compute the tokens [start, end); waits for no device."""
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        lengths = PackedLengths.from_lengths((ends - starts).tolist(), device)
        if not starts.any():
            return lengths.varlen
        tiles = _tiles(starts, ends - starts, device)
        return cls(lengths, PackedLengths.from_lengths(ends.tolist(), device), tiles)


def _tiles(starts: np.ndarray, counts: np.ndarray, device: torch.device) -> torch.Tensor:
    """VarlenBatch's, of sequences that compute so many tokens from starts on."""
    tiles = list_tiles(0, counts, 1, TILE_ROWS)
    most_first = np.argsort(-(starts[tiles[:, 0]] + tiles[:, 1]), kind="stable")
    return to_device(torch.from_numpy(tiles[most_first]), device)


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
