"""Lists of work for attention over a mixed step, decodes beside prompts, in a launch whose grid is fixed.

A program takes one entry: a split of a single token's keys, or a tile of rows of a sequence with more new tokens. The
host makes the lists, since it knows the lengths; an entry of -1 is no work.
"""

from typing import NamedTuple

import numpy as np
import torch

SPLIT = 1024  # keys of a softmax before it is merged; part of what the bits rest on
DECODE_ROWS = 16  # of a decode's tile: query heads of a kv head up to which one tile holds a token
ANY_ROWS = 64  # of a tile where no kernel reads the list


class MixedBatch(NamedTuple):
    """How a step's T tokens are distributed over sequences: single tokens first; padding sequences last.

    Attributes:
        page_tables: [B, max_pages] int32.
        cu_seqlens: [B+1] int32, cumulative counts of new tokens.
        seq_lens: [B] int32, tokens in all; 0 for a padding sequence.
        splits: [N, 2] int32, see list_splits; then -1.
        tiles: [M, 2] int32, see list_tiles; then -1.
    """

    page_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    splits: torch.Tensor
    tiles: torch.Tensor


def list_splits(seq_lens: np.ndarray, split: int = SPLIT) -> np.ndarray:
    """[n, 2] int32 (sequence, split of its keys) of the first sequences, which have one new token each."""
    counts = -(-seq_lens // split)
    sequences = np.repeat(np.arange(len(seq_lens)), counts)
    splits = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([sequences, splits], 1).astype(np.int32)


def list_tiles(first: int, num_tokens: np.ndarray, group: int, rows: int) -> np.ndarray:
    """[n, 2] int32 (sequence, its first row) of the sequences from first on.

    Args:
        num_tokens: new ones of each.
        group: query heads of a kv head, each a row of a token.
        rows: of a tile; a kernel of larger ones skips entries that are within one.
    """
    counts = -(-num_tokens * group // rows)
    sequences = np.repeat(np.arange(len(num_tokens)), counts)
    tiles = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([first + sequences, rows * tiles], 1).astype(np.int32)
