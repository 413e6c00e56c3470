"""Ground truth of log-softmax: exact maximum, exact sum of exponentials, one formula for scorer and sampler."""

import torch

_SUM_BITS = 30  # exponentials are at most 1; 30 bits and 2**22 terms stay exact in fp64


def normalizer(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pieces of log-softmax.

    Args:
        z: [T, V] fp32, already divided by the temperature.
    Returns:
        (maximum [T, 1] fp32, log of the sum of exp(z - maximum) [T, 1] fp32, exponentials [T, V] fp32).
    """
    maximum = z.amax(dim=-1, keepdim=True)
    exponentials = torch.exp(z - maximum)
    integers = torch.round(exponentials.double() * 2.0**_SUM_BITS)
    total = integers.sum(dim=-1, keepdim=True) * 2.0**-_SUM_BITS
    return maximum, torch.log(total).float(), exponentials


def token_logprobs_reference(z: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log_softmax(z) at the targets: [T] fp32."""
    maximum, log_sum, _ = normalizer(z)
    picked = z.gather(-1, targets[:, None])
    return ((picked - maximum) - log_sum)[:, 0]


def log_softmax_reference(z: torch.Tensor) -> torch.Tensor:
    """log_softmax(z): [T, V] fp32, the same bits as token_logprobs_reference at each index."""
    maximum, log_sum, _ = normalizer(z)
    return (z - maximum) - log_sum


def entropy_reference(z: torch.Tensor) -> torch.Tensor:
    """Entropy of softmax(z) in nats: [T] fp32."""
    log_p = log_softmax_reference(z)
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)
