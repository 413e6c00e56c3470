"""PrefillTail: the sequences at a step's end that compute more than one token; they attend through torch's kernels.

Those are faster over many queries than a kernel that walks pages. What they multiply is what the cache holds, read
back, so that a token's keys are the same to whoever attends to them.

A long prompt that begins goes alone to scaled_dot_product_attention (on Hopper cuDNN, faster than FlashAttention 2),
padded to one of few lengths: that library spends tens of milliseconds of CPU time on each new one. All others go to
FlashAttention together, which takes any lengths.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from octavo.ops.attention import (
    PAGE_SIZE,
    PackedLengths,
    PagedKVLayer,
    attention_batch,
    attention_of_last_tokens,
    attention_packed,
)
from octavo.ops.kv_read import read_kv
from octavo.serve.engine.to_device import to_device

# What a layer's keys and values may take that are read out of the cache for a step's prompts, in 16 bits.
READ_BYTES = 256 << 20
LONG_PROMPT = 768  # tokens; below, one kernel for all is as fast
_STEPS_AN_OCTAVE, _LEAST_STEP = 8, 128


class LongPrompt(NamedTuple):
    """One prompt from its first token on: its rows among the tail's queries and, padded, among what is read."""

    queries: slice
    keys: slice

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """q [T, H, D] of the whole tail; k, v [Tk, KH, D] -> [own tokens, H, D]."""
        start, length = self.queries.start, self.keys.stop - self.keys.start
        own = q[start : start + length]  # rows behind the prompt's end are others', and cut off below
        if missing := length - own.shape[0]:
            own = F.pad(own, (0, 0, 0, 0, 0, missing))
        # cut, then made a batch: a stride that depended on the other prompts would be as new to the library as a length
        k, v = k[self.keys][None], v[self.keys][None]
        out = attention_batch(own[None], k, v, softmax_scale=softmax_scale)
        return out[0, : self.queries.stop - start]


class RaggedSequences(NamedTuple):
    """Neighbours of any lengths. key_lengths: None where all begin in this step and one kernel takes equal ones."""

    queries: slice
    keys: slice
    lengths: PackedLengths
    key_lengths: PackedLengths | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """As LongPrompt.attend."""
        q, k, v = q[self.queries], k[self.keys], v[self.keys]
        if self.key_lengths is None:
            return attention_packed(q, k, v, self.lengths, softmax_scale=softmax_scale)[0]
        return attention_of_last_tokens(q, k, v, self.lengths, self.key_lengths, softmax_scale=softmax_scale)


class PrefillTail(NamedTuple):
    """How a step's last sequences attend, worked out once for all layers.

    Attributes:
        pieces: in the order of the queries. slots: [Tk] int64, where in the cache the keys and values of all stand.
    """

    pieces: list[LongPrompt | RaggedSequences]
    slots: torch.Tensor

    @classmethod
    def plan(
        cls, spans: list[tuple[int, int]], tables: torch.Tensor, layers: list[PagedKVLayer], device: torch.device
    ) -> "PrefillTail | None":
        """Of sequences that compute the tokens [start, end) and have these pages [B, max_pages].

        Returns:
            None where there is no sequence, or more to read than READ_BYTES.
        """
        counts = [padded_length(end) if _is_long(start, end) else end for start, end in spans]
        _, kv_heads, _, dim = layers[0].k.shape
        if not spans or 4 * sum(counts) * kv_heads * dim > READ_BYTES:
            return None
        pieces = []
        first, num_queries, num_keys = 0, 0, 0  # of the neighbours that are not yet in a piece
        while first < len(spans):
            last = first + 1
            if not _is_long(*spans[first]):
                while last < len(spans) and not _is_long(*spans[last]):
                    last += 1
            some = spans[first:last]
            queries = slice(num_queries, num_queries + sum(end - start for start, end in some))
            keys = slice(num_keys, num_keys + sum(counts[first:last]))
            is_long = _is_long(*some[0])
            pieces.append(LongPrompt(queries, keys) if is_long else _ragged(some, queries, keys, device))
            first, num_queries, num_keys = last, queries.stop, keys.stop
        return cls(pieces, to_device(_slots(spans, counts, tables), device))

    def attend(self, layer: PagedKVLayer, q: torch.Tensor, softmax_scale: float) -> list[torch.Tensor]:
        """q [T, H, D] of the tail's tokens, whose keys and values the cache holds -> the pieces of [T, H, D]."""
        k, v = read_kv(layer, self.slots, q.dtype)
        return [piece.attend(q, k, v, softmax_scale) for piece in self.pieces]


def _is_long(start: int, end: int) -> bool:
    return start == 0 and end >= LONG_PROMPT


def padded_length(num_tokens: int) -> int:
    """The length that a long prompt is padded to: an eighth of a power of two apart, 128 at least."""
    step = max(_LEAST_STEP, (1 << (num_tokens.bit_length() - 1)) // _STEPS_AN_OCTAVE)
    return -(-num_tokens // step) * step


def padded_lengths(longest: int) -> list[int]:
    """All that prompts of up to so many tokens are padded to, in rising order."""
    found = [padded_length(LONG_PROMPT)] if longest >= LONG_PROMPT else []
    while found and found[-1] < longest:
        found.append(padded_length(found[-1] + 1))
    return found


def prepare_length(length: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Let the library get ready for long prompts padded to a length; heads are (H, KH, D)."""
    query_heads, kv_heads, dim = heads
    q = torch.zeros(1, length, query_heads, dim, dtype=dtype, device=device)
    k = torch.zeros(1, length, kv_heads, dim, dtype=dtype, device=device)
    attention_batch(q, k, k, softmax_scale=dim**-0.5)


def _ragged(spans: list[tuple[int, int]], queries: slice, keys: slice, device: torch.device) -> RaggedSequences:
    lengths, key_lengths = _lengths([end - start for start, end in spans], device), None
    if any(start for start, _ in spans) or device.type == "cuda":  # there, equal lengths are as many as others
        key_lengths = _lengths([end for _, end in spans], device)
    return RaggedSequences(queries, keys, lengths, key_lengths)


def _slots(spans: list[tuple[int, int]], counts: list[int], tables: torch.Tensor) -> torch.Tensor:
    """[Tk] int64 slots of each sequence's tokens from 0 on, as many as counts says; the last one's for more."""
    ends = np.array([end for _, end in spans], dtype=np.int64)
    rows = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return slots_at(tables, rows, np.minimum(positions, ends[rows] - 1))


def slots_at(tables: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """[T] int64, page * PAGE_SIZE + offset of the tokens at positions of the sequences in rows of the page tables."""
    slots = tables.numpy()[rows, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    return torch.from_numpy(slots)


def _lengths(lengths: list[int], device: torch.device) -> PackedLengths:
    on_host = PackedLengths.from_lengths(lengths)
    return dataclasses.replace(on_host, cu_seqlens=to_device(on_host.cu_seqlens, device))
