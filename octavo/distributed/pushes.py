"""Messages among the GPUs of one host that are too large for one_shot: each rank writes into the others' memory.

A result lies in memory that the ranks share, until the next message of its kind: who keeps it makes a copy. Other
ranks take the process group's collectives, with the same bits.
"""

import itertools
import logging
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from octavo.distributed.symmetric import Shared, obstacle_to_sharing, share
from octavo.distributed.torch_private import outside_modes
from octavo.ops.push.reference import rows_each, share_of

MIN_BYTES = 8 << 20  # of a message's memory; it grows by powers of two

logger = logging.getLogger(__name__)


class Half(NamedTuple):
    """Where a message goes.

    Attributes:
        own: this rank's memory.
        addresses: [ranks] int64, of every rank's.
    """

    own: torch.Tensor
    addresses: torch.Tensor


class Memory:
    """Two buffers of each rank, in turns for messages of one kind.

    A rank that sends a message has come past the barrier behind the last one, which the others entered when they had
    read the one before: so no rank reads where it writes. The host does not see when CUDA graphs send theirs; where
    they do, another barrier goes before each.
    """

    def __init__(self, shared: Shared) -> None:
        pairs = [buffer.chunk(2) for buffer in shared.buffers]
        self.num_bytes, self.barrier = len(pairs[0][0]), shared.barrier
        self._halves = [self._half(shared.rank, buffers) for buffers in zip(*pairs, strict=True)]
        self._is_in_graphs = False

    def _half(self, rank: int, buffers: Sequence[torch.Tensor]) -> Half:
        own = buffers[rank]
        return Half(own, torch.tensor([buffer.data_ptr() for buffer in buffers], device=own.device))

    def open(self) -> Half:
        """Where the next message goes; the barrier behind it is the caller's."""
        self._is_in_graphs |= torch.cuda.is_current_stream_capturing()
        if self._is_in_graphs:
            self.barrier()
        self._halves.reverse()
        return self._halves[0]


class Pushes:
    """What a rank sends to the others of its group; all ranks make their calls in one order, on one stream.

    Args:
        group: torch's process group.
        device: this rank's GPU.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        from octavo.ops.push import triton

        self._push, self.add, self._device = triton.push, triton.add, device
        self._group = weakref.ref(group)  # whose end is the end of what _kept has of it
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._memories: dict[str, list[Memory]] = {}  # the largest last; graphs hold addresses of the others
        self._refused: set[str] = set()

    def deal(self, own: torch.Tensor, *, is_sum: bool) -> torch.Tensor | None:
        """This rank's rows of what all ranks have, by rank: parts [ranks, rows, K], or columns [rows, ranks * n].

        Args:
            own: [T, K], this rank's part of a sum, or [T, n], its columns.
        Returns:
            In shared memory; None, on all ranks, where the message cannot go this way.
        """
        T, width = own.shape
        each = rows_each(T, self.world)
        kind = "sums" if is_sum else "columns of a share"
        memory = self._memory(kind, self.world * each * width * own.itemsize) if _is_words(own) else None
        if memory is None:
            return None
        half = memory.open()
        x = own.contiguous().view(torch.int32)
        stride = x.shape[1] if is_sum else self.world * x.shape[1]
        first = self.rank * (each if is_sum else 1) * x.shape[1]
        self._push(x, half.addresses, self.rank, stride_out=stride, first_word=first, share=each)
        memory.barrier()
        mine = share_of(T, self.rank, self.world)
        rows = mine.stop - mine.start
        if is_sum:
            parts = half.own[: self.world * each * width * own.itemsize].view(own.dtype)
            return parts.view(self.world, each, width)[:, :rows]
        return half.own[: rows * self.world * width * own.itemsize].view(own.dtype).view(rows, -1)

    def gather_columns(self, *pieces: torch.Tensor) -> list[torch.Tensor] | None:
        """Of each piece every rank's columns [T, n], by rank: [T, ranks * n]; as deal returns."""
        places = [(len(x), self.world * x.shape[1], self.rank * x.shape[1]) for x in pieces]
        return self._gather("columns", pieces, places)

    def gather_rows(
        self, num_rows: int, rows: torch.Tensor, scales: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """Every rank's share of num_rows rows, by rank; as deal returns.

        Args:
            num_rows: T.
            rows: [own rows, n].
            scales: [m, own rows], a column a row; None for none.
        Returns:
            [T, n] and, of scales, [m, T].
        """
        first = share_of(num_rows, self.rank, self.world).start
        places = [(num_rows, rows.shape[1], first * rows.shape[1])]
        if scales is None:
            return self._gather("rows", (rows,), places)
        return self._gather("rows", (rows, scales), [*places, (len(scales), num_rows, first)])

    def _gather(
        self, kind: str, pieces: Sequence[torch.Tensor], places: list[tuple[int, int, int]]
    ) -> list[torch.Tensor] | None:
        """Matrices of (rows, columns) of which this rank's piece begins at an element, that all ranks make together."""
        sizes = [rows * columns * piece.itemsize for (rows, columns, _), piece in zip(places, pieces, strict=True)]
        starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
        memory = self._memory(kind, starts[-1]) if all(map(_is_words, pieces)) else None
        if memory is None:
            return None
        half, made = memory.open(), []
        for piece, start, size, (rows, columns, first) in zip(pieces, starts, sizes, places, strict=False):
            words = piece.contiguous().view(torch.int32)
            at, stride = (start + first * piece.itemsize) // 4, columns * piece.itemsize // 4
            self._push(words, half.addresses, self.rank, stride_out=stride, first_word=at)
            made.append(half.own[start : start + size].view(piece.dtype).view(rows, columns))
        memory.barrier()
        return made

    def _memory(self, kind: str, num_bytes: int) -> Memory | None:
        """For messages of so many bytes of a kind; made, by all ranks, when more come than before."""
        memories = self._memories.setdefault(kind, [])
        if memories and memories[-1].num_bytes >= num_bytes:
            return memories[-1]
        if kind in self._refused or torch.cuda.is_current_stream_capturing():
            return None
        group = self._group()
        assert group is not None, "a group that is gone sends nothing"
        with outside_modes():  # an engine may be trying out whether a step waits for the GPU; this one does, once
            shared = share(group, self._device, 2 * max(MIN_BYTES, 1 << (num_bytes - 1).bit_length()))
            made = None if isinstance(shared, str) else Memory(shared)
        if made is None:
            logger.warning("large messages of a kind (%s) go by the process group's collectives: %s", kind, shared)
            self._refused.add(kind)
            return None
        memories.append(made)
        return made


def _is_words(piece: torch.Tensor) -> bool:
    return piece.shape[1] * piece.itemsize % 4 == 0


_kept: weakref.WeakKeyDictionary[Any, Pushes | str] = weakref.WeakKeyDictionary()


def pushes_of(group: Any, device: torch.device) -> Pushes | None:
    """What the ranks of a group share, made at the first call, which all of them make; None where they cannot."""
    group = dist.group.WORLD if group is None else group
    kept = _kept.get(group)
    if kept is None:
        with outside_modes():  # see _memory
            kept = _kept[group] = obstacle_to_sharing(group, device) or Pushes(group, device)
    return None if isinstance(kept, str) else kept
