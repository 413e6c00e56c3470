"""Megatron's core attention by flash attention kernels: no scores in memory."""

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from octavo.ops.attention import attention_batch, attention_packed


class OctavoDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's DotProductAttention, with its arguments, in high precision.

    Causal and unmasked attention without dropout, windows, sinks or query-key layer scaling runs in torch's kernels,
    or on Hopper octavo's for ragged packed sequences. For the rest Megatron's own forward runs. As with
    TransformerEngine's, the type of the mask decides: a causal attention does not read attention_mask.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [S, B, H, D], key and value [S, B, KH, D] -> [S, B, H * D]; packed: without B."""
        kind = attn_mask_type or self.attn_mask_type
        if attention_bias is not None or len(query) != len(key) or not self._runs(kind):
            return super().forward(  # type: ignore[no-any-return]
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        options = {"softmax_scale": self.softmax_scale, "causal": kind != AttnMaskType.no_mask}
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q
            out = attention_packed(query, key, value, lengths, **options)[0]
            return out.flatten(1)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [B, S, heads, D]
        return attention_batch(q, k, v, **options).transpose(0, 1).flatten(2)

    def _runs(self, kind: AttnMaskType) -> bool:
        config = self.config
        is_plain = kind in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.no_mask)
        has_dropout = self.training and self.attention_dropout.p > 0
        has_own_softmax = config.softmax_type != "vanilla" or config.apply_query_key_layer_scaling
        return is_plain and not (has_dropout or has_own_softmax or config.window_size)
