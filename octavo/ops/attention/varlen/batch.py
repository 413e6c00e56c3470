"""VarlenBatch: which queries see which keys where sequences of any lengths lie one after the other."""

from typing import NamedTuple

import numpy as np
import torch

from octavo.ops._runtime.to_device import to_device
from octavo.ops.attention.mixed import list_tiles
from octavo.ops.attention.padding import PackedLengths

TILE_ROWS = 64  # queries of a program


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
        tiles = list_tiles(0, ends - starts, 1, TILE_ROWS)
        most_first = np.argsort(-(starts[tiles[:, 0]] + tiles[:, 1]), kind="stable")
        lengths = PackedLengths.from_lengths((ends - starts).tolist(), device)
        key_lengths = PackedLengths.from_lengths(ends.tolist(), device) if starts.any() else lengths
        return cls(lengths, key_lengths, to_device(torch.from_numpy(tiles[most_first]), device))
