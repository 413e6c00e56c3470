"""What the contexts of an engine's steps share: new keys and values go into the pages before a layer attends."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.attention import PagedKVLayer, write_kv
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation, qkv_to_cache


class PagesContext(ABC):
    """A nn.CachingContext over paged keys and values; how queries meet them is the subclass's.

    Attributes:
        positions: [T] int64, each token's position in its sequence.
        slot_mapping: [T] int64, page * PAGE_SIZE + offset of each token; -1 for a padding token.
        layers: the cache.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    layers: Sequence[PagedKVLayer]

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float
    ) -> torch.Tensor:
        """Write the new keys and values, then attend over the pages; see nn.AttentionContext."""
        write_kv(self.layers[layer_index], k, v, self.slot_mapping)
        return self.attend_cached(layer_index, q, softmax_scale=softmax_scale)

    def attend_qkv(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        *,
        softmax_scale: float,
        out_scaling: Scaling | None = None,
    ) -> torch.Tensor | QuantizedTensor:
        """The same from a projection whole; see nn.CachingContext."""
        q = qkv_to_cache(qkv, self.layers[layer_index], self.slot_mapping, rotation, norms)
        codes = None if out_scaling is None else self.attend_to_codes(layer_index, q, out_scaling, softmax_scale)
        return self.attend_cached(layer_index, q, softmax_scale=softmax_scale) if codes is None else codes

    @abstractmethod
    def attend_cached(self, layer_index: int, q: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
        """Attend over the pages, in which the new keys and values stand already: q [T, H, D] -> the same shape."""

    def attend_to_codes(
        self, layer_index: int, q: torch.Tensor, out_scaling: Scaling, softmax_scale: float
    ) -> QuantizedTensor | None:
        """attend_cached as codes [T, H * D]; None where a context makes none."""
        return None
