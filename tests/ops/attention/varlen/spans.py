"""Ragged sequences and their attention in fp64."""

import torch

from octavo.testing import generate
from tests.ops.attention.softmax import softmax_fp64

# Prompts, rests of prompts, single tokens; ends at and beside whole tiles of queries and steps of keys.
MIXED = [(0, 64), (0, 1), (63, 64), (100, 101), (0, 130), (60, 140), (64, 128), (127, 129), (0, 63), (3, 200)]
NEW = [(0, 70), (0, 3), (0, 129)]


def draw(
    spans: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """q, k and v of sequences that compute the tokens [start, end); heads are (H, KH, D)."""
    query_heads, kv_heads, dim = heads
    counts = sum(end - start for start, end in spans), sum(end for _, end in spans)
    shapes = [(counts[0], query_heads), (counts[1], kv_heads), (counts[1], kv_heads)]
    return tuple(
        generate("normal", (tokens, num * dim), dtype, seed=seed, device=device).view(tokens, num, dim)
        for seed, (tokens, num) in enumerate(shapes)
    )


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """[T, H, D] fp64, each sequence on its own."""
    queries = q.split([end - start for start, end in spans])
    keys, values = (x.split([end for _, end in spans]) for x in (k, v))
    return torch.cat([softmax_fp64(*one) for one in zip(queries, keys, values, strict=True)])
