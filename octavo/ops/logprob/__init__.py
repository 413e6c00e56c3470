"""Log-probabilities of tokens: log_softmax(logits / temperature), untruncated; one function for trainer and sampler.

rows.py holds the fused row ops of the inexact path, chunks.py the chunks of logits that they work on.
"""

import torch

from octavo import env
from octavo.errors import DtypeError, ShapeError
from octavo.ops.logprob.reference import SUM_BITS, entropy_of, normalizer
from octavo.ops.logprob.rows import cross_entropy_rows, logit_grads, logit_rows

__all__ = [
    "cross_entropy_rows",
    "entropy",
    "log_softmax",
    "logit_grads",
    "logit_rows",
    "softmax",
    "token_logprobs",
]

Temperature = float | torch.Tensor


def _normalize(logits: torch.Tensor, temperature: Temperature) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, log of the sum of exp(z - maximum)), [T, 1] each, of z = logits / temperature; and the divisor."""
    if logits.dim() != 2:
        raise ShapeError(f"logits must be [T, V], got shape {tuple(logits.shape)}")
    if logits.dtype != torch.float32:
        raise DtypeError(f"logits must be float32 (the lm_head writes fp32), got {logits.dtype}")
    # tensor by tensor: one rounding, the same on both sides; and a number that is filled in waits for no device
    if isinstance(temperature, torch.Tensor):
        divisor = temperature.float().reshape(-1, 1)
    else:
        divisor = torch.full((1, 1), float(temperature), dtype=torch.float32, device=logits.device)
    if logits.is_cuda and logits.shape[1] and not env.force_reference():
        from octavo.ops.logprob import triton

        return *triton.exact_normalizer(logits, divisor, SUM_BITS), divisor
    return *normalizer(logits / divisor), divisor


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Log-probability of one token a row.

    Args:
        logits: [T, V] fp32.
        targets: [T] int64.
        temperature: > 0, a number or [T] fp32.
    Returns:
        [T] fp32, natural log.
    Raises:
        ShapeError: for other shapes.
        DtypeError: for other dtypes.
    Exactness: bitwise within a device; bits of a row depend on that row alone.
    """
    if targets.shape != logits.shape[:1]:
        raise ShapeError(f"targets must have shape ({logits.shape[0]},), got {tuple(targets.shape)}")
    maximum, log_sum, divisor = _normalize(logits, temperature)
    picked = logits.gather(-1, targets[:, None]) / divisor
    return ((picked - maximum) - log_sum)[:, 0]


def log_softmax(logits: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary, the same bits as token_logprobs at each index: [T, V] fp32."""
    maximum, log_sum, divisor = _normalize(logits, temperature)
    return (logits / divisor - maximum) - log_sum


def softmax(logits: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Probabilities of the whole vocabulary: [T, V] fp32."""
    return log_softmax(logits, temperature).exp()


def entropy(logits: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Entropy of softmax(logits / temperature) in nats: [T] fp32."""
    return entropy_of(log_softmax(logits, temperature))
