"""What the one-shot kernels compute, from all ranks' messages at once."""

from collections.abc import Sequence

import torch


def gather(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbouring columns [T, n] of all ranks, by rank: [T, ranks * n]."""
    return torch.cat(list(pieces), dim=1)


def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum in fp32, in the order of the ranks, rounded to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
