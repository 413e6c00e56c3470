"""The tests' GPT in plain torch with octavo's norms: torch.nn.Linear and octavo.convert, cut as Megatron's is.

Operations stand in the order of Megatron's local layers, so that its losses can be equal in bits.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.nn import LayerNorm
from octavo.numerics import Recipe

LAYERS, HIDDEN, HEADS, VOCAB, SEQ = 2, 128, 4, 64, 32


class _Copy(torch.autograd.Function):
    """One tensor for all ranks; their gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _sum(grad.clone())


class _Add(torch.autograd.Function):
    """The sum of all ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _sum(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Gather(torch.autograd.Function):
    """All ranks' slices of a dim; a rank's gradient is that of its slice, or its slice of the sum of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, adds: bool) -> torch.Tensor:
        ctx.dim, ctx.adds = dim, adds
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own(_sum(grad.clone()) if ctx.adds else grad, ctx.dim).contiguous(), None, None


class _Scatter(torch.autograd.Function):
    """A rank's slice of the first dim, of the sum of all ranks' tensors or of one that all have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, adds: bool) -> torch.Tensor:
        return own(_sum(x.clone()) if adds else x, 0).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts), None


def _sum(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def own(x: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's slice."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class PlainLayer(nn.Module):
    """x [S, B, HIDDEN] -> the same; under sequence parallelism S of this rank."""

    def __init__(self, num_ranks: int, sequence: bool) -> None:
        super().__init__()
        self.num_ranks, self.sequence = num_ranks, sequence
        self.norm1, self.norm2 = (LayerNorm(HIDDEN, dtype=torch.float32) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // num_ranks)
        self.fc1 = nn.Linear(HIDDEN, 4 * HIDDEN // num_ranks, bias=False)
        self.fc1_bias = nn.Parameter(torch.zeros(4 * HIDDEN // num_ranks))
        self.proj, self.fc2 = (nn.Linear(size * HIDDEN // num_ranks, HIDDEN, bias=False) for size in (1, 4))
        self.proj_bias, self.fc2_bias = (nn.Parameter(torch.zeros(HIDDEN)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self._enter(self.norm1(x)))
        qkv = qkv.view(*qkv.shape[:2], HEADS // self.num_ranks, -1)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.chunk(3, dim=-1))  # [B, heads, S, D]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + (self._leave(self.proj(attended)) + self.proj_bias)
        hidden = F.gelu(self.fc1(self._enter(self.norm2(x))) + self.fc1_bias)
        return x + (self._leave(self.fc2(hidden)) + self.fc2_bias)

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_ranks == 1:
            return x
        return _Gather.apply(x, 0, True) if self.sequence else _Copy.apply(x)  # type: ignore[no-any-return]

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_ranks == 1:
            return x
        return _Scatter.apply(x, True) if self.sequence else _Add.apply(x)  # type: ignore[no-any-return]


class PlainGPT(nn.Module):
    """ids [B, S] -> logits [B, S, VOCAB]."""

    def __init__(self, num_ranks: int, recipe: Recipe, sequence: bool) -> None:
        super().__init__()
        self.num_ranks, self.sequence = num_ranks, sequence
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.layers = nn.ModuleList(PlainLayer(num_ranks, sequence) for _ in range(LAYERS))
        octavo.convert(self.layers, recipe)
        self.norm = LayerNorm(HIDDEN, dtype=torch.float32)
        self.head = nn.Linear(HIDDEN, VOCAB // num_ranks, bias=False)
        if dist.is_initialized():
            octavo.nn.set_amax_reduction_group(self, dist.group.WORLD)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = (self.words(ids) + self.places(torch.arange(SEQ).expand_as(ids))).transpose(0, 1).contiguous()
        x = _Scatter.apply(x, False) if self.sequence else x
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.num_ranks > 1:
            x = _Gather.apply(x, 0, True) if self.sequence else _Copy.apply(x)
        out = self.head(x)
        return (out if self.num_ranks == 1 else _Gather.apply(out, 2, False)).transpose(0, 1)

    def load_megatron(self, weights: dict[str, torch.Tensor]) -> None:
        """Take the weights of a Megatron model with as many ranks; of the vocabulary's embedding, those of all."""
        words = weights["embedding.word_embeddings.weight"]
        mine = {
            "words.weight": words if self.num_ranks == 1 else _Gather.apply(words, 0, False),
            "places.weight": weights["embedding.position_embeddings.weight"],
            "norm.weight": weights["decoder.final_layernorm.weight"],
            "norm.bias": weights["decoder.final_layernorm.bias"],
            "head.weight": weights["output_layer.weight"],
        }
        for i in range(LAYERS):
            for name, theirs in NAMES.items():
                mine[f"layers.{i}.{name}"] = weights[f"decoder.layers.{i}.{theirs}"]
        self.load_state_dict(mine)

    def replicated(self) -> list[nn.Parameter]:
        """What each rank has seen some of the tokens of, under sequence parallelism."""
        names = [
            name for name, _ in self.named_parameters() if "norm" in name or name.endswith(("proj_bias", "fc2_bias"))
        ]
        return [self.get_parameter(name) for name in names] if self.sequence else []


NAMES = {  # of a layer: plain -> Megatron's
    **{f"norm1.{kind}": f"input_layernorm.{kind}" for kind in ("weight", "bias")},
    **{f"norm2.{kind}": f"pre_mlp_layernorm.{kind}" for kind in ("weight", "bias")},
    **{f"qkv.{kind}": f"self_attention.linear_qkv.{kind}" for kind in ("weight", "bias")},
    "fc1.weight": "mlp.linear_fc1.weight",
    "fc1_bias": "mlp.linear_fc1.bias",
    "proj.weight": "self_attention.linear_proj.weight",
    "proj_bias": "self_attention.linear_proj.bias",
    "fc2.weight": "mlp.linear_fc2.weight",
    "fc2_bias": "mlp.linear_fc2.bias",
}
