"""The inputs of a step that is one CUDA graph: all that differs from step to step, in one vector, sent by one copy."""

import math
from collections.abc import Sequence as Rows
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from octavo.ops.attention import MixedBatch
from octavo.ops.attention.mixed import DECODE_ROWS, SPLIT, list_splits, list_tiles
from octavo.serve.engine.scheduler import Chunk


class MixedShape(NamedTuple):
    """What a step is filled up to.

    Attributes:
        num_tokens: T.
        num_sequences: B.
        num_splits: N, of single tokens' keys.
        num_tiles: M, of rows of the other sequences.
        num_slots: of the engine; the slot of a padding sequence.
    """

    num_tokens: int
    num_sequences: int
    num_splits: int
    num_tiles: int
    num_slots: int

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The shapes of MixedInputs' tensors, in order."""
        tokens, sequences = (self.num_tokens,), (self.num_sequences,)
        tables = (self.num_sequences + 1,), (self.num_splits, 2), (self.num_tiles, 2)
        return [tokens, tokens, tokens, sequences, sequences, *tables]


class MixedInputs(NamedTuple):
    """The vector's parts, int32.

    Attributes:
        token_ids: [T]; -1 - s for the token that slot s has.
        positions: [T], in their sequences.
        sequences: [T], each token's row of slots; -1 for a padding token.
        slots: [B].
        seq_lens: [B], 0 for a padding sequence.
        cu_seqlens: [B+1].
        splits: [N, 2], see ops.attention.MixedBatch.
        tiles: [M, 2], likewise.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sequences: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor
    splits: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def of(cls, vector: torch.Tensor, shape: MixedShape) -> "MixedInputs":
        """Views of a vector [sum of all]."""
        parts = vector.split([math.prod(part) for part in shape.parts])
        return cls(*(x.view(part) for x, part in zip(parts, shape.parts, strict=True)))

    def batch(self, page_tables: torch.Tensor) -> MixedBatch:
        """What attention takes; page_tables [B, max_pages] int32."""
        return MixedBatch(page_tables, self.cu_seqlens, self.seq_lens, self.splits, self.tiles)


class Work(NamedTuple):
    """A step's lists for attention: splits and tiles, see ops.attention.MixedBatch."""

    splits: np.ndarray
    tiles: np.ndarray

    @classmethod
    def of(cls, lengths: list[int], ends: list[int], group: int, rows: int) -> "Work":
        """Of sequences, single tokens first.

        Args:
            lengths: new tokens of each.
            ends: tokens in all.
            group: query heads of a kv head.
            rows: of a tile.
        """
        num_single = lengths.count(1) if group <= DECODE_ROWS else 0  # others would take several tiles
        splits = list_splits(np.array(ends[:num_single], dtype=np.int64), SPLIT)
        tiles = list_tiles(num_single, np.array(lengths[num_single:], dtype=np.int64), group, rows)
        return cls(splits, tiles)


def empty_vector(shape: MixedShape, *, pinned: bool) -> torch.Tensor:
    """The inputs of padding alone, on the host."""
    num = sum(math.prod(part) for part in shape.parts)
    vector = torch.zeros(num, dtype=torch.int32, pin_memory=pinned)
    inputs = MixedInputs.of(vector, shape)
    for unused in (inputs.sequences, inputs.splits, inputs.tiles):
        unused.fill_(-1)
    inputs.slots.fill_(shape.num_slots)
    return vector


def fill_vector(shape: MixedShape, chunks: Rows[Chunk], slots: Rows[int], work: Work, *, pinned: bool) -> torch.Tensor:
    """The inputs of a step, on the host.

    Args:
        chunks: single tokens first; no more tokens and sequences than shape has.
        slots: of their sequences.
        work: no longer than shape's.
        pinned: in memory from which a copy goes by itself.
    """
    vector = empty_vector(shape, pinned=pinned)
    arrays = [x.numpy() for x in MixedInputs.of(vector, shape)]
    token_ids, positions, sequences, slot_rows, seq_lens, starts, splits, tiles = arrays
    ids: list[int] = []
    for chunk, slot in zip(chunks, slots, strict=True):
        ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        if chunk.has_pending:
            ids.append(-1 - slot)
    lengths = np.array([chunk.end - chunk.start for chunk in chunks])
    ends = np.array([chunk.end for chunk in chunks])
    cu_seqlens = np.array([*accumulate(lengths.tolist(), initial=0)])
    n, num = len(ids), len(chunks)
    token_ids[:n] = ids
    positions[:n] = np.arange(n) + np.repeat(ends - cu_seqlens[1:], lengths)
    sequences[:n] = np.repeat(np.arange(num), lengths)
    slot_rows[:num] = slots
    seq_lens[:num] = ends
    starts[: num + 1] = cu_seqlens
    starts[num + 1 :] = n
    splits[: len(work.splits)] = work.splits
    tiles[: len(work.tiles)] = work.tiles
    return vector
