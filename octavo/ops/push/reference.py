"""What all ranks' pushes leave at one rank."""

from collections.abc import Sequence

import torch


def rows_each(num_rows: int, world: int) -> int:
    """Rows of a share, but for the last ones."""
    return -(-num_rows // world)


def share_of(num_rows: int, rank: int, world: int) -> slice:
    """The rows of a matrix that a rank owns: ceil(num_rows / world) of them, the last rank what is left."""
    each = rows_each(num_rows, world)
    return slice(min(rank * each, num_rows), min((rank + 1) * each, num_rows))


def deal_parts(parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """This rank's rows of all ranks' parts [T, K], one after the other: [ranks, rows, K]."""
    return torch.stack([part[share_of(len(part), rank, len(parts))] for part in parts])


def deal_columns(pieces: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """This rank's rows of neighbouring columns [T, n] of all ranks: [rows, ranks * n]."""
    return torch.cat([piece[share_of(len(piece), rank, len(pieces))] for piece in pieces], dim=1)
