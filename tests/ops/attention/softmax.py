"""Plain attention in fp64, which every kind of attention is compared with."""

import math
from collections.abc import Sequence

import torch


def softmax_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Differentiable attention, sequence by sequence; lengths None is one, whose queries are of its last tokens."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    wide = (q.double(), *(x.double().repeat_interleave(group, dim=1) for x in (k, v)))
    out = []
    for a, b, c in [wide] if lengths is None else zip(*(x.split(list(lengths)) for x in wide), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) * scale
        if causal:
            places = torch.arange(len(b), device=q.device)
            scores = scores.masked_fill(places > places[len(b) - len(a) :, None], -math.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    return torch.cat(out)
