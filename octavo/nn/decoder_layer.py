"""Pre-norm transformer layers, the same on every side: attention and then the MLP, or both at once."""

import torch
from torch import nn

from octavo.distributed.tensor_group import RowShare, whole
from octavo.distributed.token_shards import TokenShards
from octavo.nn.attention import Attention
from octavo.nn.attention_context import AttentionContext
from octavo.nn.functional.norm_linear import Addend, norm_linear
from octavo.nn.functional.norm_mlp import norm_mlp
from octavo.nn.functional.norm_parallel import can_infer_parallel, infer_parallel
from octavo.nn.fusion import FusedLayer, fusable
from octavo.nn.layer_norm import LayerNorm
from octavo.nn.mlp import MLP, GeluMLP
from octavo.nn.moe import SparseMoE
from octavo.nn.rms_norm import RMSNorm


@fusable
class DecoderLayer(FusedLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); the residual stream stays in the model's dtype.

    Args:
        self_attn: the attention block.
        mlp: the MLP block.
        hidden_size: model width.
        eps: of both norms.

    Attributes:
        token_shards: how tokens are cut among tensor-parallel ranks; with gradients x and the result are then this
            rank's own, [t, hidden_size]. None for all tokens on every rank.
    """

    token_shards: TokenShards | None = None

    def __init__(
        self,
        self_attn: Attention,
        mlp: MLP | SparseMoE,
        hidden_size: int,
        eps: float,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        stream, addend = self.advance(x, None, context)
        return whole(stream) + whole(addend)

    def advance(
        self, x: torch.Tensor | RowShare, addend: Addend | None, context: AttentionContext
    ) -> tuple[torch.Tensor | RowShare, Addend]:
        """The layer between two sums, which the next norm's kernel makes; forward begins and ends with one.

        Args:
            x: [T, hidden_size], the residual stream but for addend, which is still to be added to it; of a model that
                is cut among ranks perhaps this one's share of the rows.
        Returns:
            The stream after the layer, in the same two parts.
        """
        attn, mlp = self.self_attn, self.mlp
        if self.token_shards is not None:
            self.token_shards.num_tokens = context.positions.shape[0]
        if not self.fuses(*self.children()):
            x = whole(x) if addend is None else whole(x) + whole(addend)
            x = x + attn(self.input_layernorm(x), context)
            return x, mlp(self.post_attention_layernorm(x))
        qkv, x = norm_linear(x, addend, self.input_layernorm, attn.qkv_proj, fused=self.fuses(attn.qkv_proj))
        out = attn.attend(qkv, context)
        if isinstance(mlp, SparseMoE):
            rows, x = mlp.forward_norm(x, out, self.post_attention_layernorm)
            return x, rows
        linears = (mlp.gate_up_proj, mlp.down_proj)
        out, x = norm_mlp(x, out, self.post_attention_layernorm, *linears, "swiglu", fused=self.fuses(*linears))
        return x, out

    def fused_modules(self) -> list[nn.Module]:
        """See FusedLayer: also what its blocks' projections are."""
        mlp = self.mlp
        linears = [] if isinstance(mlp, SparseMoE) else [mlp.gate_up_proj, mlp.down_proj]
        return [*self.children(), self.self_attn.qkv_proj, *linears]


@fusable
class ParallelDecoderLayer(FusedLayer):
    """x + attention(norm(x)) + mlp(norm(x)) with one LayerNorm for both (GPT-J).

    Args:
        self_attn: the attention block.
        mlp: the MLP block.
        hidden_size: model width.
        eps: of the norm.

    Attributes:
        token_shards: as DecoderLayer's.
    """

    token_shards: TokenShards | None = None

    def __init__(
        self,
        self_attn: Attention,
        mlp: GeluMLP,
        hidden_size: int,
        eps: float,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(hidden_size, eps, dtype=dtype, device=device)
        self.self_attn = self_attn
        self.mlp = mlp

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        x, addend = self.advance(x, None, context)
        return x + addend

    def advance(
        self, x: torch.Tensor, addend: torch.Tensor | None, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer between two sums, as DecoderLayer.advance; both branches read one norm, quantized once."""
        norm, attn, mlp = self.input_layernorm, self.self_attn, self.mlp
        linears = (attn.qkv_proj, mlp.fc_in, mlp.fc_out)
        if self.token_shards is not None:
            self.token_shards.num_tokens = context.positions.shape[0]
        if self.fuses(*self.fused_modules()) and can_infer_parallel(norm, *linears):
            qkv, out, x = infer_parallel(x, addend, norm, *linears, "gelu")
            return x, whole(attn.attend(qkv, context)) + out
        x = x if addend is None else x + addend
        normed = norm(x)
        return x, attn(normed, context) + mlp(normed)

    def fused_modules(self) -> list[nn.Module]:
        """See FusedLayer: also what its blocks' projections are."""
        return [*self.children(), self.self_attn.qkv_proj, self.mlp.fc_in, self.mlp.fc_out]
