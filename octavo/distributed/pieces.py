"""A large tensor on the hosts from the first rank to all, in pieces: what gloo holds of it at a time is bounded."""

from typing import Any

import torch
import torch.distributed as dist

PIECE_BYTES = 64 << 20


def broadcast_in_pieces(data: torch.Tensor, group: Any) -> None:
    """Give the first rank's bytes to all, in place; a collective.

    Args:
        data: [n] uint8 on the CPU.
        group: a gloo group of all ranks.
    """
    for piece in data.split(PIECE_BYTES) if data.numel() else ():
        broadcast_piece(piece, group)


def broadcast_piece(piece: torch.Tensor, group: Any) -> None:
    """At most PIECE_BYTES."""
    dist.broadcast(piece, 0, group=group)
