"""VarlenPrefill: the sequences at a step's end that compute more than one token; they attend through torch's kernels.

Those are faster over many queries than a kernel that walks pages. What they multiply is what the cache holds, read
back, so that a token's keys are the same for every query that attends to them.

Long prompts that begin go to scaled_dot_product_attention (on Hopper cuDNN, faster than FlashAttention 2), padded to
few lengths and a few of one length at a time: that library spends tens of milliseconds of CPU time on each new shape.
All others go to FlashAttention together, which takes any lengths.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from octavo.ops._runtime.to_device import to_device
from octavo.ops.attention import (
    PAGE_SIZE,
    PackedLengths,
    PagedKVLayer,
    attention_batch,
    attention_of_last_tokens,
    attention_packed,
)
from octavo.ops.attention.kv_read import read_kv

# What a layer's keys and values may take that are read out of the cache for a step's prompts, in 16 bits.
READ_BYTES = 256 << 20
LONG_PROMPT = 768  # tokens; below, one kernel for all is as fast
SDPA_BATCH_SIZES = (
    4,
    2,
    1,
)  # long prompts of one padded length that attend at a time: one alone leaves processors idle
_STEPS_AN_OCTAVE, _LEAST_STEP = 8, 128


class PaddedSdpaBatch(NamedTuple):
    """Neighbours of one padded length, each from its first token on.

    Attributes:
        queries: their rows among the prefill's queries.
        keys: theirs, padded, among what is read.
        length: what they are padded to.
        padded: [rows of keys] int64, the row of the prefill's queries that stands at each; None where none is padded.
        own: [rows of queries] int64, where each stands among the padded ones; None likewise.
    """

    queries: slice
    keys: slice
    length: int
    padded: torch.Tensor | None
    own: torch.Tensor | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """q [T, H, D] of the whole prefill; k, v [Tk, KH, D] -> [own tokens, H, D]."""
        # cut, then made a batch: a stride that depended on the other prompts would be as new to the library as a length
        own = q[self.queries] if self.padded is None else q[self.padded]
        own, k, v = (x.unflatten(0, (-1, self.length)) for x in (own, k[self.keys], v[self.keys]))
        out = attention_batch(own, k, v, softmax_scale=softmax_scale).flatten(0, 1)
        return out if self.own is None else out[self.own]


class RaggedSequences(NamedTuple):
    """Neighbours of any lengths. key_lengths: None where all begin in this step and one kernel takes equal ones."""

    queries: slice
    keys: slice
    lengths: PackedLengths
    key_lengths: PackedLengths | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """As PaddedSdpaBatch.attend."""
        q, k, v = q[self.queries], k[self.keys], v[self.keys]
        if self.key_lengths is None:
            return attention_packed(q, k, v, self.lengths, softmax_scale=softmax_scale)[0]
        return attention_of_last_tokens(q, k, v, self.lengths, self.key_lengths, softmax_scale=softmax_scale)


class VarlenPrefill(NamedTuple):
    """How a step's last sequences attend, worked out once for all layers; best in the order of their long_length.

    Attributes:
        pieces: in the order of the queries.
        slots: [Tk] int64, where in the cache the keys and values of all stand.
    """

    pieces: list[PaddedSdpaBatch | RaggedSequences]
    slots: torch.Tensor

    @classmethod
    def plan(
        cls, spans: list[tuple[int, int]], tables: torch.Tensor, layers: list[PagedKVLayer], device: torch.device
    ) -> "VarlenPrefill | None":
        """Of sequences that compute the tokens [start, end) and have these pages [B, max_pages].

        Returns:
            None where there is no sequence, or more to read than READ_BYTES.
        """
        lengths = [long_length(start, end) for start, end in spans]
        counts = [length or end for length, (_, end) in zip(lengths, spans, strict=True)]
        _, kv_heads, _, dim = layers[0].k.shape
        if not spans or 4 * sum(counts) * kv_heads * dim > READ_BYTES:
            return None
        pieces: list[PaddedSdpaBatch | RaggedSequences] = []
        first, num_queries, num_keys = 0, 0, 0  # of the neighbours that are not yet in a piece
        while first < len(spans):
            equal = next((i for i in range(first, len(spans)) if lengths[i] != lengths[first]), len(spans)) - first
            last = first + (next(n for n in SDPA_BATCH_SIZES if n <= equal) if lengths[first] else equal)
            some = spans[first:last]
            queries = slice(num_queries, num_queries + sum(end - start for start, end in some))
            keys = slice(num_keys, num_keys + sum(counts[first:last]))
            if lengths[first]:
                pieces.append(_long([end for _, end in some], queries, keys, lengths[first], device))
            else:
                pieces.append(_ragged(some, queries, keys, device))
            first, num_queries, num_keys = last, queries.stop, keys.stop
        return cls(pieces, to_device(_slots(spans, counts, tables), device))

    def attend(self, layer: PagedKVLayer, q: torch.Tensor, softmax_scale: float) -> list[torch.Tensor]:
        """q [T, H, D] of the prefill's tokens, whose keys and values the cache holds -> the pieces of [T, H, D]."""
        k, v = read_kv(layer, self.slots, q.dtype)
        return [piece.attend(q, k, v, softmax_scale) for piece in self.pieces]


def long_length(start: int, end: int) -> int:
    """What a sequence that computes the tokens [start, end) is padded to as a long prompt; 0 if it is none.

    Sequences in the order of this number are in the fewest pieces.
    """
    return padded_length(end) if start == 0 and end >= LONG_PROMPT else 0


def padded_length(num_tokens: int) -> int:
    """The length that a long prompt is padded to: an eighth of a power of two apart, 128 at least."""
    step = _step(num_tokens)
    return -(-num_tokens // step) * step


def _step(num_tokens: int) -> int:
    """The distance of the lengths that prompts of about so many tokens are padded to."""
    return max(_LEAST_STEP, (1 << (num_tokens.bit_length() - 1)) // _STEPS_AN_OCTAVE)


def padded_lengths(longest: int) -> list[int]:
    """All that prompts of up to so many tokens are padded to, in rising order."""
    found = [padded_length(LONG_PROMPT)] if longest >= LONG_PROMPT else []
    while found and found[-1] < longest:
        found.append(padded_length(found[-1] + 1))
    return found


def long_batches(longest: int, max_tokens: int, max_seqs: int) -> list[tuple[int, int]]:
    """All (prompts, length) that steps of so many tokens and sequences can send to the library.

    Args:
        longest: tokens of a prompt.
    """
    return [
        (num, length)
        for length in padded_lengths(longest)
        for num in reversed(SDPA_BATCH_SIZES)
        # the shortest prompts that are padded so far
        if num == 1 or (num <= max_seqs and num * max(LONG_PROMPT, length - _step(length - 1) + 1) <= max_tokens)
    ]


def prepare_batch(num: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Let the library get ready for so many long prompts padded to a length; heads are (H, KH, D)."""
    query_heads, kv_heads, dim = heads
    q = torch.zeros(num, length, query_heads, dim, dtype=dtype, device=device)
    k = torch.zeros(num, length, kv_heads, dim, dtype=dtype, device=device)
    attention_batch(q, k, k, softmax_scale=dim**-0.5)


def _long(ends: list[int], queries: slice, keys: slice, length: int, device: torch.device) -> PaddedSdpaBatch:
    if all(end == length for end in ends):
        return PaddedSdpaBatch(queries, keys, length, None, None)
    own, tokens = np.array(ends), np.arange(length)
    firsts = queries.start + np.cumsum(own) - own
    padded = firsts[:, None] + np.minimum(tokens, own[:, None] - 1)  # filled up with the last token: not read
    places = np.flatnonzero((tokens < own[:, None]).reshape(-1))
    rows, back = (to_device(torch.from_numpy(x.reshape(-1).astype(np.int64)), device) for x in (padded, places))
    return PaddedSdpaBatch(queries, keys, length, rows, back)


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
