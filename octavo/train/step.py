"""One optimizer step: micro-batches, one global token mean, clipping, update; and the loss that all of it is about."""

import dataclasses
import math

import torch

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.models import Decoder
from octavo.nn import PackedContext, token_logprobs
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.numerics.infinity import take_infinity
from octavo.run.optimizer import MasterAdamW
from octavo.train.data import IGNORED, Batch
from octavo.train.nonfinite import explain_nonfinite


@dataclasses.dataclass(frozen=True)
class TrainStepResult:
    """What a step measured: mean loss in nats over its targets, gradient norm before clipping, its tokens."""

    loss: float
    grad_norm: float
    num_tokens: int


def summed_loss(model: Decoder, batch: Batch) -> torch.Tensor:
    """Sum of -log p(target) over the batch's targets: fp32 scalar, differentiable."""
    numerics = model.numerics
    context = PackedContext.of_numerics(batch.cu_seqlens, numerics)
    hidden = model(batch.input_ids, context)  # [tokens, hidden_size]
    bias, group = model.head_bias, model.head_group
    if not numerics.exact and group is None:
        return linear_cross_entropy(
            hidden, model.head_weight, batch.targets, ignore_index=IGNORED, reduction="sum", head_bias=bias
        )
    counts = batch.targets != IGNORED
    targets = torch.where(counts, batch.targets, 0)
    options = {"exact": numerics.exact, "with_entropy": False, "head_bias": bias, "tensor_group": group}
    logprobs, _ = token_logprobs(hidden, model.head_weight, targets, **options)  # type: ignore[arg-type]
    return -(logprobs * counts).sum()


def train_step(
    model: Decoder,
    optimizer: MasterAdamW,
    batches: list[Batch],
    *,
    lr: float,
    max_grad_norm: float,
    step: int,
    mesh: Mesh = ONE_PROCESS,
) -> TrainStepResult:
    """Update the model once.

    Args:
        batches: micro-batches of all ranks; the loss is the mean over the targets of all of them together, however they
            are cut.
        step: for messages, from 1.
        mesh: of the ranks, each of which computes its own share of the micro-batches.
    Returns:
        What all micro-batches came to, the same on every rank.
    Raises:
        NonFiniteError: loss or gradients are inf or NaN, or an operand of a linear in FP8 was infinite; nothing was
            updated, and the first bad tensor is named.
    """
    own = [batches[index].to(model.device) for index in mesh.own_share(len(batches))]
    num_targets = max(sum(batch.num_targets for batch in batches), 1)
    losses = []
    for index, batch in enumerate(own):
        mesh.at(f"step {step}: forward of its micro-batch {index}")
        loss = summed_loss(model, batch) / num_targets
        mesh.at(f"step {step}: backward of its micro-batch {index}")
        loss.backward()
        optimizer.accumulate_gradients()
        losses.append(loss.detach())
    mesh.at(f"step {step}: gradient norm")
    norm = optimizer.clip_gradients(max_grad_norm)
    infinity = mesh.largest_of_slices(take_infinity(model.device))
    found = mesh.in_order(torch.stack([*losses, infinity]))
    total = torch.zeros((), device=model.device)
    for of_one in found[: len(batches)]:
        total += of_one
    # an infinity that FP8 hid from both is on the quantizers' flag: one read for all three
    mean_loss, grad_norm, is_infinite = torch.stack([total, norm, found[len(batches) :].max()]).tolist()
    if is_infinite or not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad()
        raise explain_nonfinite(model, own, summed_loss, step, mesh)
    mesh.at(f"step {step}: optimizer")
    optimizer.step(lr=lr)
    return TrainStepResult(mean_loss, grad_norm, sum(len(batch.input_ids) for batch in batches))
