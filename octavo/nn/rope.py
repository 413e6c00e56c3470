"""Rotary embedding as a module: fp32 tables made once and shared by every layer, trainer and sampler."""

from typing import Any

import torch
from torch import nn

from octavo.nn.fusion import fusable
from octavo.ops.attention.rope import apply_rope, rope_tables


@fusable
class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines, and the rotation.

    Args:
        head_dim: elements of a head that turn, even; where a head has more, its last ones stay as they are.
        max_positions: longest context.
        theta: base.
        scaling: Hugging Face rope parameters (see octavo.ops.attention.rope.rope_tables) or None.
        interleaved: neighbours are pairs (GPT-J), not elements half a head apart.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float = 10000.0,
        scaling: dict[str, Any] | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.max_positions, self.interleaved = max_positions, interleaved
        cos, sin = rope_tables(head_dim, max_positions, theta, scaling)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move the tables between devices; they stay fp32 whatever dtype the model is cast to."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, H, D] by positions [T] int64."""
        return _Rotate.apply(x, positions, self.cos, self.sin, self.interleaved)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(positions, cos, sin)
        ctx.interleaved = interleaved
        return apply_rope(x, positions, cos, sin, interleaved=interleaved)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        positions, cos, sin = ctx.saved_tensors
        return apply_rope(grad, positions, cos, sin, interleaved=ctx.interleaved, back=True), None, None, None, None
