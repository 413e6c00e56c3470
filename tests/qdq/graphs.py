"""Small models with explicit pairs, and their graphs under rewrite."""

from collections.abc import Callable

import torch
from torch import nn

from octavo.qdq import dequantize, quantize, quantize_dynamic
from octavo.qdq.graph import DEQUANTIZE, QUANTIZE, Rewriter

SCALE = 2.0**-5
Body = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


class Model(nn.Module):
    """A function of inputs, with named tensors as buffers."""

    def __init__(self, body: Body, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.body = body
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.body(self, *inputs)


def export(body: Body, *inputs: torch.Tensor, **buffers: torch.Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Model(body, **buffers).eval(), inputs)


def rewriter_of(body: Body, *inputs: torch.Tensor, **buffers: torch.Tensor) -> Rewriter:
    return Rewriter(export(body, *inputs, **buffers).module(check_guards=False))


def run(rewriter: Rewriter, *inputs: torch.Tensor) -> torch.Tensor:
    """The graph as it stands, checked."""
    rewriter.graph.eliminate_dead_code()
    rewriter.graph.lint()
    rewriter.module.recompile()
    with torch.no_grad():
        return rewriter.module(*inputs)


def rewritten(body: Body, x: torch.Tensor, *moves: Callable[[Rewriter], object], **buffers: torch.Tensor) -> Rewriter:
    """A graph after moves, each of which found something to do and changed no bit of what it computes."""
    rewriter = rewriter_of(body, x, **buffers)
    wanted = run(rewriter, x)
    for move in moves:
        assert move(rewriter), move
        assert torch.equal(run(rewriter, x), wanted), move
    return rewriter


def pair(x: torch.Tensor, scale: torch.Tensor | float = SCALE) -> torch.Tensor:
    """DQ(Q(x)) of one scale a tensor, in x's dtype."""
    return dequantize(quantize(x, scale), scale, dtype=x.dtype)


def count(rewriter: Rewriter, *targets: object) -> int:
    rewriter.graph.eliminate_dead_code()
    return len(rewriter.nodes(*targets))


def num_pairs(rewriter: Rewriter) -> tuple[int, int]:
    """(Qs, DQs)."""
    return count(rewriter, QUANTIZE), count(rewriter, DEQUANTIZE)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# What products and norms are tried on: K in, N out.
K, N = 64, 32
X = randn(2, 5, K)
W = randn(N, K, seed=1)
BIAS = randn(N, seed=2)
ROW_SCALE = torch.linspace(0.01, 0.03, N)[:, None].contiguous()


def row_pair(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(w, scale, kind="per_row"), scale, kind="per_row", dtype=w.dtype)


def dynamic_pair(x: torch.Tensor, kind: str) -> torch.Tensor:
    return dequantize(*quantize_dynamic(x, kind=kind), kind=kind, dtype=x.dtype)
