"""PagedContext: how a step's new tokens meet the keys and values in the pages (nn.AttentionContext)."""

import dataclasses

import numpy as np
import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.to_device import to_device
from octavo.ops.attention import PagedKVLayer, attention_paged
from octavo.ops.attention.varlen import empty_codes, rows_of, store_attended, stores_codes
from octavo.serve.engine.caching_context import PagesContext
from octavo.serve.engine.varlen_prefill import VarlenPrefill, slots_at


@dataclasses.dataclass(frozen=True)
class PagedContext(PagesContext):
    """One step's tokens, packed, and where they stand in the cache.

    Attributes:
        positions: [T] int64, each token's position in its sequence.
        slot_mapping: [T] int64, page * PAGE_SIZE + offset of each token.
        page_tables: [B, max_pages] int32, padded with page 0.
        cu_seqlens_q: [B+1] int32, cumulative counts of new tokens.
        seq_lens: [B] int32, tokens in all.
        max_query_len: the most new tokens of a sequence, so that no GPU is asked.
        max_seq_len: the largest of seq_lens, likewise.
        layers: the cache.
        exact: the model's numerics.
        num_decodes: sequences at the front that have one new token each; they are attended to on their own, because a
            kernel for long queries would walk their keys one block after the other.
        prefill: the sequences after those, over packed keys; None where exact, or where they are too long.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    page_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    layers: list[PagedKVLayer]
    exact: bool
    num_decodes: int = 0
    prefill: VarlenPrefill | None = None

    @classmethod
    def build(
        cls,
        spans: list[tuple[int, int]],
        page_tables: list[list[int]],
        layers: list[PagedKVLayer],
        exact: bool,
        device: torch.device,
    ) -> "PagedContext":
        """Context of sequences that compute the tokens [start, end) each.

        Args:
            spans: (start, end) of each sequence.
            page_tables: each one's pages.
        """
        lengths = [end - start for start, end in spans]
        tables = torch.zeros(len(spans), max(map(len, page_tables)), dtype=torch.int32)
        for row, table in zip(tables.numpy(), page_tables, strict=True):  # numpy: hundreds of rows, a step each
            row[: len(table)] = table
        positions, slots = _places(spans, tables)
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor([end for _, end in spans], dtype=torch.int32)
        num_decodes = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
        return cls(
            positions=to_device(positions, device),
            slot_mapping=to_device(slots, device),
            page_tables=to_device(tables, device),
            cu_seqlens_q=to_device(cu_seqlens, device),
            seq_lens=to_device(seq_lens, device),
            max_query_len=max(lengths),
            max_seq_len=max(end for _, end in spans),
            layers=layers,
            exact=exact,
            num_decodes=num_decodes,
            prefill=None if exact else VarlenPrefill.plan(spans[num_decodes:], tables[num_decodes:], layers, device),
        )

    def attend_cached(self, layer_index: int, q: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
        if self._prefill_of(layer_index) is None:
            return self._attend_pages(self.layers[layer_index], q, softmax_scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend_into(out, layer_index, q, softmax_scale=softmax_scale)
        return out

    def attend_into(
        self, out: torch.Tensor | QuantizedTensor, layer_index: int, q: torch.Tensor, *, softmax_scale: float
    ) -> None:
        """attend_cached, whose result goes to out: [T, H, D], or codes [T, H * D]."""
        layer, prefill, n = self.layers[layer_index], self._prefill_of(layer_index), self.num_decodes
        if prefill is None:
            store_attended(self._attend_pages(layer, q, softmax_scale), out)
            return
        if n:
            scaling = None if isinstance(out, torch.Tensor) else out.scaling
            decoded = self._attend(layer, q[:n], slice(0, n), self.cu_seqlens_q[: n + 1], 1, softmax_scale, scaling)
            store_attended(decoded, rows_of(out, 0, n))
        prefill.attend(layer, q[n:], softmax_scale, rows_of(out, n, q.shape[0]))

    def attend_to_codes(
        self, layer_index: int, q: torch.Tensor, out_scaling: Scaling, softmax_scale: float
    ) -> QuantizedTensor | None:
        """Of single tokens, or where the kernel for prompts stores them."""
        layer = self.layers[layer_index]
        if self.max_query_len == 1:
            codes = self._attend(layer, q, slice(None), self.cu_seqlens_q, 1, softmax_scale, out_scaling)
            assert isinstance(codes, QuantizedTensor), "they were asked for"
            return codes
        if self._prefill_of(layer_index) is None or not stores_codes(q, out_scaling):
            return None
        codes = empty_codes(q.shape[0], q.shape[1] * q.shape[2], out_scaling, q.device)
        self.attend_into(codes, layer_index, q, softmax_scale=softmax_scale)
        return codes

    def _prefill_of(self, layer_index: int) -> VarlenPrefill | None:
        """None where all sequences attend over the pages."""
        return self.prefill if self.layers[layer_index].attention_dtype == "bf16" else None

    def _attend_pages(self, layer: PagedKVLayer, q: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """q [T, H, D] of all sequences, over the pages."""
        n, end, starts, longest = self.num_decodes, self.seq_lens.shape[0], self.cu_seqlens_q, self.max_query_len
        if not 0 < n < end:
            return self._attend_some(layer, q, slice(0, end), starts, longest, softmax_scale)
        decoded = self._attend_some(layer, q[:n], slice(0, n), starts[: n + 1], 1, softmax_scale)
        rest = self._attend_some(layer, q[n:], slice(n, end), starts[n:] - n, longest, softmax_scale)
        return torch.cat([decoded, rest])

    def _attend_some(
        self, layer: PagedKVLayer, q: torch.Tensor, rows: slice, starts: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        out = self._attend(layer, q, rows, starts, longest, scale, None)
        assert isinstance(out, torch.Tensor), "no codes were asked for"
        return out

    def _attend(
        self,
        layer: PagedKVLayer,
        q: torch.Tensor,
        rows: slice,
        starts: torch.Tensor,
        longest: int,
        scale: float,
        out_scaling: Scaling | None,
    ) -> torch.Tensor | QuantizedTensor:
        return attention_paged(
            q,
            layer,
            self.page_tables[rows],
            starts,
            self.seq_lens[rows],
            softmax_scale=scale,
            exact=self.exact,
            max_query_len=longest,
            max_seq_len=self.max_seq_len,
            out_scaling=out_scaling,
        )


def _places(spans: list[tuple[int, int]], tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, slots), each [T] int64, of the tokens [start, end) of sequences with these pages."""
    starts, ends = np.array(spans, dtype=np.int64).T
    lengths = ends - starts
    rows = np.repeat(np.arange(len(spans)), lengths)
    positions = np.arange(len(rows)) + np.repeat(ends - np.cumsum(lengths), lengths)
    return torch.from_numpy(positions), slots_at(tables, rows, positions)
