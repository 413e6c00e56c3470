"""Two whole transformer blocks in plain torch, as their authors write them: Llama's and GPT-J's, for Q/DQ pairs.

B batch, S tokens a sequence, H hidden, D head_dim.
"""

import dataclasses
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """Sizes of one block."""

    name: str
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int

    @property
    def linear_params(self) -> int:
        """Weights of a block's linears: each is multiplied and added once a token."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = (2 if self.name.startswith("GPT-J") else 3) * self.ffn_hidden_size
        return self.hidden_size * (2 * q + 2 * kv + mlp)

    def num_flops(self, batch: int, seq_len: int) -> float:
        """Of a forward's linears."""
        return 2.0 * self.linear_params * batch * seq_len


LLAMA_3_8B_BLOCK = BlockShape("Llama-3-8B", 4096, 14336, 32, 8, 128, 128)
GPT_J_6B_BLOCK = BlockShape("GPT-J-6B", 4096, 16384, 16, 16, 256, 64)
TOY_LLAMA_BLOCK = BlockShape("Llama, toy", 128, 256, 4, 2, 32, 32)
TOY_GPT_J_BLOCK = BlockShape("GPT-J, toy", 128, 512, 4, 4, 32, 16)


class _Block(nn.Module, ABC):
    """What both blocks share: tables for RoPE, and causal attention of heads that `_rotate` turns."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, shape: BlockShape, max_len: int) -> None:
        super().__init__()
        self.shape = shape
        _add_rope_tables(self, max_len, shape.rotary_dim)
        self.rope_cos: torch.Tensor  # [max_len, rotary_dim] fp32, both halves alike
        self.rope_sin: torch.Tensor

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H], normed -> [B, S, heads * D]."""
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, heads, S, D]
        q, k = (self._rotate(heads, length) for heads in (q, k))
        is_grouped = self.shape.num_heads != self.shape.num_kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return out.transpose(1, 2).reshape(batch, length, -1)

    @abstractmethod
    def _rotate(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """RoPE of x [B, heads, S, D]."""


class LlamaBlock(_Block):
    """RMSNorm, attention with grouped queries and RoPE, RMSNorm, SwiGLU; two residual adds."""

    def __init__(self, shape: BlockShape, max_len: int) -> None:
        super().__init__(shape, max_len)
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.input_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.post_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.q_proj = nn.Linear(shape.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=False)
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        x = x + self.o_proj(self._attend(self.input_norm(x)))
        normed = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def _rotate(self, x: torch.Tensor, length: int) -> torch.Tensor:
        cos, sin = (table[:length].to(x.dtype) for table in (self.rope_cos, self.rope_sin))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class GPTJBlock(_Block):
    """One LayerNorm feeds attention (RoPE on interleaved pairs of the first dims) and a GeLU MLP; one residual add."""

    def __init__(self, shape: BlockShape, max_len: int) -> None:
        super().__init__(shape, max_len)
        inner = shape.num_heads * shape.head_dim
        self.ln_1 = nn.LayerNorm(shape.hidden_size, eps=1e-5)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(shape.hidden_size, inner, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(inner, shape.hidden_size, bias=False)
        self.fc_in = nn.Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.fc_out = nn.Linear(shape.ffn_hidden_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        normed = self.ln_1(x)
        attended = self.out_proj(self._attend(normed))
        return x + attended + self.fc_out(F.gelu(self.fc_in(normed), approximate="tanh"))

    def _rotate(self, x: torch.Tensor, length: int) -> torch.Tensor:
        half = self.shape.rotary_dim // 2
        cos, sin = (table[:length, :half].to(x.dtype) for table in (self.rope_cos, self.rope_sin))
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return torch.cat((pairs.flatten(-2), rest), dim=-1)


def make_block(shape: BlockShape, max_len: int, *, dtype: torch.dtype, device: str, seed: int = 0) -> nn.Module:
    """A block with random weights of the usual size."""
    kind = GPTJBlock if shape.name.startswith("GPT-J") else LlamaBlock
    with torch.random.fork_rng(devices=[] if device == "cpu" else None):
        torch.manual_seed(seed)
        with torch.device(device):
            return kind(shape, max_len).to(dtype).eval()


def _add_rope_tables(module: nn.Module, max_len: int, rotary_dim: int) -> None:
    angles = torch.outer(
        torch.arange(max_len, dtype=torch.float32),
        10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim),
    )  # [max_len, rotary_dim / 2]
    both = torch.cat((angles, angles), dim=-1)
    module.register_buffer("rope_cos", both.cos())
    module.register_buffer("rope_sin", both.sin())
