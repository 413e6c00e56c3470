"""The error of a training step whose loss, gradients or operands are not finite."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.errors import NonFiniteError
from octavo.run.first_bad_tensor import first_bad_tensor
from octavo.train.data import Batch

M = TypeVar("M", bound=torch.nn.Module)


def explain_nonfinite(
    model: M,
    batches: Iterable[Batch],
    loss_fn: Callable[[M, Batch], torch.Tensor],
    step: int,
    mesh: Mesh = ONE_PROCESS,
) -> NonFiniteError:
    """Re-run a bad step and say which tensor was the first that is inf or NaN.

    Args:
        step: for the message. The rest is first_bad_tensor's.
    Returns:
        The error to raise. The model's gradients are cleared.
    """
    found = first_bad_tensor(model, batches, loss_fn, mesh)
    where = found or "nothing when the step was run again, so the sum over micro-batches overflowed"
    return NonFiniteError(
        f"step {step}: loss, gradients or an operand of a linear in FP8 are not finite; the first tensor to go bad: "
        f"{where}. Nothing was saved; lower optimizer.lr, or resume from the last checkpoint with another "
        "precision.recipe"
    )
