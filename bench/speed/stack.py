"""The stack that `layer`, `step` and `sizes` measure: Llama's layer in plain torch, its sizes, its FLOPs.

No lm_head, no embedding and no RoPE: what is left is what FP8 can speed up, beside attention and the optimizer.
bench.speed.whole_model has all of these. B batch, S tokens a sequence, H hidden, D head_dim.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from octavo.models import ModelConfig

EPS = 1e-5
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GatedUnit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class StackShape:
    """Sizes of a stack and of its batch; vocab_size is that of the embedding and the head around it, 0 for none."""

    name: str
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int
    batch: int
    seq_len: int
    vocab_size: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.seq_len

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each projection of a layer."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        h, f = self.hidden_size, self.ffn_hidden_size
        return {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q), "gate": (f, h), "up": (f, h), "down": (h, f)}

    @property
    def num_params(self) -> int:
        """Parameters of the whole stack, and of embedding, last norm and head where it has them."""
        linears = sum(n * k for n, k in self.linear_sizes.values())
        around = (2 * self.vocab_size + 1) * self.hidden_size if self.vocab_size else 0
        return self.layers * (linears + 2 * self.hidden_size) + around

    @property
    def linear_flops(self) -> float:
        """Of a step's linears in the layers: output, grad_input and grad_weight."""
        a_token = sum(2.0 * n * k for n, k in self.linear_sizes.values())
        return 3 * a_token * self.num_tokens * self.layers

    @property
    def attention_flops(self) -> float:
        """Of a step's causal attention, forward and twice that backward, nothing recomputed."""
        forward = 2.0 * self.batch * self.seq_len**2 * self.num_heads * self.head_dim
        return 3 * forward * self.layers

    @property
    def head_flops(self) -> float:
        """Of a step's head, nothing recomputed."""
        return 3 * 2.0 * self.vocab_size * self.hidden_size * self.num_tokens

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.name}, {self.batch} x {self.seq_len} tokens"


class PlainLayer(nn.Module):
    """A Llama layer as anyone writes it in torch: norm, attention, norm, SwiGLU.

    Args:
        norm: RMSNorm.
        gated_unit: SwiGLU's elementwise part.
        rotate: RoPE over q [B, heads, S, D] and k; None for none.
    """

    def __init__(self, shape: StackShape, norm: Norm, gated_unit: GatedUnit, rotate: Rotate | None = None) -> None:
        super().__init__()
        self.shape, self._norm, self._gated_unit, self._rotate = shape, norm, gated_unit, rotate
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.ffn_norm = nn.Parameter(torch.ones(shape.hidden_size))
        sizes = shape.linear_sizes
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(sizes[name][1], sizes[name][0], bias=False) for name in ("q", "k", "v", "o", "gate", "up", "down")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> the same shape."""
        x = x + self.o(self._attend(self._norm(x, self.attention_norm)))
        h = self._norm(x, self.ffn_norm)
        return x + self.down(self._gated_unit(self.gate(h), self.up(h)))

    def _attend(self, h: torch.Tensor) -> torch.Tensor:
        batch, seq_len, _ = h.shape
        heads = (batch, seq_len, -1, self.shape.head_dim)
        q, k, v = (project(h).view(heads).transpose(1, 2) for project in (self.q, self.k, self.v))  # [B, heads, S, D]
        if self._rotate is not None:
            q, k = self._rotate(q, k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch, seq_len, -1)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm by torch."""
    return F.rms_norm(x, (weight.numel(),), weight, EPS)


def torch_gated_unit(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's elementwise part by torch."""
    return F.silu(gate) * up


def llama_config(shape: StackShape, *, vocab_size: int, **fields: Any) -> ModelConfig:
    """The shape as octavo's Decoder takes it, with other fields of its config."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_layers=shape.layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.seq_len,
        **fields,
    )


def torch_rotate(cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """RoPE by torch, as transformers writes Llama's; cos and sin [S, D] of the model's dtype."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return lambda q, k: (turn(q), turn(k))


def draw_weights(shape: StackShape, seed: int, device: str) -> dict[str, torch.Tensor]:
    """A layer's projections in bf16, drawn as nn.Linear draws them; every variant starts from these."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, (rows, cols) in shape.linear_sizes.items():
        uniform = torch.rand(rows, cols, generator=generator, device=device)
        weights[name] = ((2 * uniform - 1) * cols**-0.5).to(torch.bfloat16)
    return weights


def draw_input(shape: StackShape, device: str) -> torch.Tensor:
    """The batch that every step sees: [B, S, H] bf16, standard normal."""
    generator = torch.Generator(device).manual_seed(1234)
    sizes = (shape.batch, shape.seq_len, shape.hidden_size)
    return torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16)
