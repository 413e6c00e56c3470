"""Validation: the mean loss over a fixed stretch of held-out text, the same at every step and in every run."""

import math
from collections.abc import Iterable

import torch

from octavo.models import Decoder
from octavo.train.data import Batch
from octavo.train.step import summed_loss


@torch.no_grad()
def validation_loss(model: Decoder, batches: Iterable[Batch]) -> float:
    """Mean loss in nats a token, in the model's own numerics. Leaves no trace in the model.

    Args:
        batches: see octavo.train.data.validation_batches.
    """
    total, num_targets = 0.0, 0
    for batch in batches:
        total += float(summed_loss(model, batch.to(model.device)))
        num_targets += batch.num_targets
    return total / max(num_targets, 1)


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; infinity where that overflows."""
    return math.exp(loss) if loss < 700.0 else math.inf
