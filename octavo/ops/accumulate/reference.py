"""Ground truth of adding gradients up: torch's own additions. Device-free."""

from collections.abc import Sequence

import torch

Terms = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]  # sum, old, gradient


def add_gradients(terms: Sequence[Terms]) -> None:
    """sum = old + gradient in fp32; arguments as octavo.ops.accumulate.add_gradients takes them."""
    for own, old, grad in terms:
        if old is None:
            own.copy_(grad)
            continue
        if own is not old:
            own.copy_(old)
        own += grad
