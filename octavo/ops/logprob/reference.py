"""Ground truth of log-softmax: exact sums and one formula for scorer and sampler; below, the inexact path in fp32."""

import torch

SUM_BITS = 30  # exponentials are at most 1; 30 bits and 2**22 terms stay exact in fp64


def normalizer(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What log-softmax takes away from each row, in two parts.

    Args:
        z: [T, V] fp32, already divided by the temperature.
    Returns:
        (maximum [T, 1] fp32, log of the sum of exp(z - maximum) [T, 1] fp32).
    """
    maximum = z.amax(dim=-1, keepdim=True)
    units = torch.round(torch.exp(z - maximum).double() * 2.0**SUM_BITS)
    return maximum, torch.log(units.sum(dim=-1, keepdim=True) * 2.0**-SUM_BITS).float()


def entropy_of(log_p: torch.Tensor) -> torch.Tensor:
    """Entropy of rows of log-probabilities [T, V], -inf allowed: [T] fp32."""
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)


def logit_rows_reference(
    logits: torch.Tensor, targets: torch.Tensor, inv_temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of each row of logits [T, V] at targets [T]: (lse, logprobs, entropy), [T] fp32 each.

    The entropy is empty where not asked for.
    """
    x = logits.float()
    maximum, exponentials = _exponentials(x, inv_temperature)
    total = exponentials.sum(dim=-1)
    entropy = total.new_empty(0)
    if with_entropy:
        distance = (x - maximum) * inv_temperature
        moment = torch.where(exponentials == 0, 0.0, exponentials * distance).sum(dim=-1)
        entropy = torch.log(total) - moment / total
    lse, logprobs = _at_targets(x, maximum, total, targets, inv_temperature)
    return lse, logprobs, entropy


def logit_grads_reference(
    grads: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    target_weights: torch.Tensor,
    inv_temperature: float,
    first_col: int,
) -> None:
    """grads [T, C] = softmax * weights - onehot * target_weights for the columns [first_col, first_col + C).

    A row whose weight is 0 has only its target's part, whatever its logits.
    """
    softmax = (logits.float() * inv_temperature).sub_(lse[:, None]).exp_()
    _write_grads(grads, softmax, weights, targets - first_col, weights, target_weights)


def cross_entropy_rows_reference(
    grads: torch.Tensor | None, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, z_loss: float
) -> torch.Tensor:
    """Each row's cross-entropy plus z_loss * lse**2, [T] fp32; its gradient goes into grads [T, V], where given."""
    x = logits.float()
    is_ignored = targets == ignore_index
    safe = torch.where(is_ignored, 0, targets)
    maximum, exponentials = _exponentials(x, 1.0)
    total = exponentials.sum(dim=-1)
    lse, logprobs = _at_targets(x, maximum, total, safe, 1.0)
    if grads is not None:
        weights = torch.where(is_ignored, 0.0, 1.0 + 2.0 * z_loss * lse)
        _write_grads(grads, exponentials, weights / total, safe, weights, (~is_ignored).float())
    return torch.where(is_ignored, 0.0, z_loss * lse * lse - logprobs)


def _exponentials(x: torch.Tensor, inv_temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(maximum [T, 1], finite where all of a row is -inf; exp((x - maximum) * inv_temperature) [T, V])."""
    maximum = x.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    distance = x - maximum
    return maximum, (distance if inv_temperature == 1.0 else distance.mul_(inv_temperature)).exp_()


def _at_targets(
    x: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, targets: torch.Tensor, inv_temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logsumexp, log-probability of the target), [T] each."""
    log_total = torch.log(total)
    picked = (x.gather(1, targets[:, None]) - maximum) * inv_temperature
    return maximum[:, 0] * inv_temperature + log_total, picked[:, 0] - log_total


def _write_grads(
    grads: torch.Tensor,
    numerator: torch.Tensor,
    factors: torch.Tensor,
    columns: torch.Tensor,
    weights: torch.Tensor,
    target_weights: torch.Tensor,
) -> None:
    """grads = numerator * factors, 0 in rows of weight 0, less target_weights at each row's column; numerator is spent.

    Only few rows and one element a row are touched after the product, which is most of a CPU's time.
    """
    out = torch.mul(numerator, factors[:, None], out=grads if grads.dtype == torch.float32 else numerator)
    out[weights == 0] = 0.0
    rows = ((columns >= 0) & (columns < out.shape[1])).nonzero()[:, 0]
    out[rows, columns[rows]] -= target_weights[rows]
    if out is not grads:
        grads.copy_(out)
