"""PagedContext: how a step's new tokens meet the keys and values in the pages (nn.AttentionContext)."""

import dataclasses
from typing import NamedTuple

import torch

from octavo.ops.attention import PAGE_SIZE, PackedLengths, PagedKVLayer, attention_packed, attention_paged, write_kv
from octavo.ops.kv_read import read_kv
from octavo.ops.qkv_cache import HeadNorms, Rotation, qkv_to_cache

# Whether, exact off, sequences that begin in a step attend through torch's kernels, which are faster over long prompts,
# to the cache's own rounding of their keys and values. Off until it is measured on a card.
FRESH_THROUGH_LIBRARY = False


class FreshTail(NamedTuple):
    """The sequences at a batch's end that begin in this step: all their keys are new and lie packed, as their queries.

    Attributes:
        first_sequence, first_token: where they begin. lengths: theirs.
    """

    first_sequence: int
    first_token: int
    lengths: PackedLengths


@dataclasses.dataclass(frozen=True)
class PagedContext:
    """One step's tokens, packed, and where they stand in the cache.

    Attributes:
        positions: [T] int64, each token's position in its sequence.
        slot_mapping: [T] int64, page * PAGE_SIZE + offset of each token.
        block_tables: [B, max_pages] int32, padded with page 0.
        cu_seqlens_q: [B+1] int32, cumulative counts of new tokens. seq_lens: [B] int32, tokens in all.
        max_query_len, max_seq_len: the largest of both, so that no GPU is asked.
        layers: the cache.
        exact: the model's numerics.
        num_decodes: sequences at the front that have one new token each; they are attended to on their own, because a
            kernel for long queries would walk their keys one block after the other.
        fresh: the sequences that do not read the pages at all, or None.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    layers: list[PagedKVLayer]
    exact: bool
    num_decodes: int = 0
    fresh: FreshTail | None = None

    @classmethod
    def build(
        cls,
        spans: list[tuple[int, int]],
        block_tables: list[list[int]],
        layers: list[PagedKVLayer],
        exact: bool,
        device: torch.device,
    ) -> "PagedContext":
        """Context of sequences that compute the tokens [start, end) each.

        Args:
            spans: (start, end) of each sequence. block_tables: each one's pages.
        """
        lengths = [end - start for start, end in spans]
        width = max(map(len, block_tables))
        tables = torch.tensor([table + [0] * (width - len(table)) for table in block_tables], dtype=torch.int32)
        positions = torch.cat([torch.arange(start, end) for start, end in spans])  # [T]
        rows = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lengths))  # [T]
        slots = tables[rows, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor([end for _, end in spans], dtype=torch.int32)
        return cls(
            positions=to_device(positions, device),
            slot_mapping=to_device(slots, device),
            block_tables=to_device(tables, device),
            cu_seqlens_q=to_device(cu_seqlens, device),
            seq_lens=to_device(seq_lens, device),
            max_query_len=max(lengths),
            max_seq_len=max(end for _, end in spans),
            layers=layers,
            exact=exact,
            num_decodes=next((i for i, length in enumerate(lengths) if length > 1), len(lengths)),
            fresh=None if exact or not FRESH_THROUGH_LIBRARY else _fresh_tail(spans, device),
        )

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float
    ) -> torch.Tensor:
        """Write the new keys and values, then attend over the pages; see nn.AttentionContext."""
        write_kv(self.layers[layer_index], k, v, self.slot_mapping)
        return self._attend(layer_index, q, softmax_scale)

    def attend_qkv(
        self, layer_index: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None, *, softmax_scale: float
    ) -> torch.Tensor:
        """The same from a projection whole; see nn.CachingContext."""
        q = qkv_to_cache(qkv, self.layers[layer_index], self.slot_mapping, rotation, norms)
        return self._attend(layer_index, q, softmax_scale)

    def _attend(self, layer_index: int, q: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        layer = self.layers[layer_index]
        if self.fresh is None or layer.attention_dtype != "bf16":
            return self._attend_pages(layer, q, self.seq_lens.shape[0], softmax_scale)
        num_paged, end, lengths = self.fresh
        k, v = read_kv(layer, self.slot_mapping[end:], q.dtype)
        fresh, _ = attention_packed(q[end:], k, v, lengths, softmax_scale=softmax_scale)
        return torch.cat([self._attend_pages(layer, q[:end], num_paged, softmax_scale), fresh]) if end else fresh

    def _attend_pages(self, layer: PagedKVLayer, q: torch.Tensor, end: int, softmax_scale: float) -> torch.Tensor:
        """q [T, H, D] of the first sequences up to end, over the pages."""
        n, starts = min(self.num_decodes, end), self.cu_seqlens_q[: end + 1]
        longest = self.max_query_len if n < end else 1
        if not 0 < n < end:
            return self._attend_some(layer, q, slice(0, end), starts, longest, softmax_scale)
        decoded = self._attend_some(layer, q[:n], slice(0, n), starts[: n + 1], 1, softmax_scale)
        rest = self._attend_some(layer, q[n:], slice(n, end), starts[n:] - n, longest, softmax_scale)
        return torch.cat([decoded, rest])

    def _attend_some(
        self, layer: PagedKVLayer, q: torch.Tensor, rows: slice, starts: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        return attention_paged(
            q,
            layer,
            self.block_tables[rows],
            starts,
            self.seq_lens[rows],
            softmax_scale=scale,
            exact=self.exact,
            max_query_len=longest,
            max_seq_len=self.max_seq_len,
        )


def _fresh_tail(spans: list[tuple[int, int]], device: torch.device) -> FreshTail | None:
    """Of sequences that compute the tokens [start, end): the last ones that begin, with more than one token each."""
    first = len(spans)
    while first and spans[first - 1][0] == 0 and spans[first - 1][1] > 1:
        first -= 1
    if first == len(spans):
        return None
    lengths = PackedLengths.from_lengths([end for _, end in spans[first:]])
    lengths = dataclasses.replace(lengths, cu_seqlens=to_device(lengths.cu_seqlens, device))
    return FreshTail(first, sum(end - start for start, end in spans[:first]), lengths)


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor without making the CPU wait for the GPU."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
