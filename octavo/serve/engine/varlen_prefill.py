"""VarlenPrefill: the sequences at a step's end that compute more than one token attend over packed keys and values.

That is faster over many queries than a kernel that walks pages. What they multiply is what the cache holds, read back,
so that a token's keys are the same for every query that attends to them.
"""

from typing import NamedTuple

import numpy as np
import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.to_device import to_device
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer
from octavo.ops.attention.kv_read import read_kv
from octavo.ops.attention.varlen import VarlenBatch, attention_varlen

# What a layer's keys and values may take that are read out of the cache for a step's prompts, in 16 bits.
READ_BYTES = 256 << 20


class VarlenPrefill(NamedTuple):
    """How a step's last sequences attend, worked out once for all layers.

    Attributes:
        batch: their queries and keys.
        slots: [Tk] int64, where in the cache the keys and values of all stand.
    """

    batch: VarlenBatch
    slots: torch.Tensor

    @classmethod
    def plan(
        cls, spans: list[tuple[int, int]], tables: torch.Tensor, layers: list[PagedKVLayer], device: torch.device
    ) -> "VarlenPrefill | None":
        """Of sequences that compute the tokens [start, end) and have these pages [B, max_pages].

        Returns:
            None where there is no sequence, or more to read than READ_BYTES.
        """
        counts = [end for _, end in spans]
        _, kv_heads, _, dim = layers[0].k.shape
        if not spans or 4 * sum(counts) * kv_heads * dim > READ_BYTES:
            return None
        rows = np.repeat(np.arange(len(spans)), counts)
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(VarlenBatch.of(spans, device), to_device(slots_at(tables, rows, positions), device))

    def attend(
        self, layer: PagedKVLayer, q: torch.Tensor, softmax_scale: float, out: torch.Tensor | QuantizedTensor
    ) -> None:
        """q [T, H, D] of the prefill's tokens, whose keys and values the cache holds; out as attention_varlen's."""
        k, v = read_kv(layer, self.slots, q.dtype)
        attention_varlen(q, k, v, self.batch, out, softmax_scale=softmax_scale)


def slots_at(tables: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """[T] int64, page * PAGE_SIZE + offset of the tokens at positions of the sequences in rows of the page tables."""
    slots = tables.numpy()[rows, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    return torch.from_numpy(slots)
