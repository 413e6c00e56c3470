"""Validation: the mean loss over a fixed stretch of held-out text, the same at every step and in every run."""

import math
from collections.abc import Iterable

import torch

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.models import Decoder
from octavo.train.data import Batch
from octavo.train.step import summed_loss


@torch.no_grad()
def validation_loss(model: Decoder, batches: Iterable[Batch], mesh: Mesh = ONE_PROCESS) -> float:
    """Mean loss in nats a token, in the model's own numerics. Leaves no trace in the model.

    Args:
        batches: see octavo.train.data.validation_batches; the same on every rank.
        mesh: of the ranks, which take the batches in turn. The bits are those of one process.
    """
    whole = list(batches)
    losses = []
    for first in range(0, len(whole), mesh.world_size):
        # where a sharded model runs, all ranks do; what is computed beyond the last batch is left out below
        batch = whole[min(first + mesh.rank, len(whole) - 1)]
        losses.append(summed_loss(model, batch.to(model.device)))
    if not losses:
        return 0.0
    total = sum(mesh.in_order(torch.stack(losses)).tolist()[: len(whole)])
    return total / max(sum(batch.num_targets for batch in whole), 1)


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; infinity where that overflows."""
    return math.exp(loss) if loss < 700.0 else math.inf
