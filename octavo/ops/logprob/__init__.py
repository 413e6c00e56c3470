"""Log-probabilities of tokens: log_softmax(logits / temperature), untruncated; one function for trainer and sampler.

rows.py holds the fused row ops of the inexact road, chunks.py the chunks of logits that they work on.
"""

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.ops.logprob.reference import (
    entropy_reference,
    log_softmax_reference,
    normalizer,
    token_logprobs_reference,
)
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


def _tempered(logits: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    if logits.dim() != 2:
        raise ShapeError(f"logits must be [T, V], got shape {tuple(logits.shape)}")
    if logits.dtype != torch.float32:
        raise DtypeError(f"logits must be float32 (the lm_head writes fp32), got {logits.dtype}")
    if not isinstance(temperature, torch.Tensor):
        temperature = torch.tensor(float(temperature), dtype=torch.float32, device=logits.device)
    if temperature.dim():
        temperature = temperature[:, None]
    return logits / temperature.float()  # tensor by tensor: one rounding, the same on both sides


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Log-probability of one token a row.

    Args:
        logits: [T, V] fp32. targets: [T] int64. temperature: > 0, a number or [T] fp32.
    Returns:
        [T] fp32, natural log.
    Raises:
        ShapeError, DtypeError: for other shapes or dtypes.
    Exactness: bitwise within a device; bits of a row depend on that row alone.
    """
    if targets.shape != logits.shape[:1]:
        raise ShapeError(f"targets must have shape ({logits.shape[0]},), got {tuple(targets.shape)}")
    return token_logprobs_reference(_tempered(logits, temperature), targets)


def log_softmax(logits: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary, the same bits as token_logprobs at each index: [T, V] fp32."""
    return log_softmax_reference(_tempered(logits, temperature))


def softmax(logits: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Probabilities of the whole vocabulary: [T, V] fp32."""
    _, log_sum, exponentials = normalizer(_tempered(logits, temperature))
    return exponentials / log_sum.exp()


def entropy(logits: torch.Tensor, temperature: Temperature = 1.0) -> torch.Tensor:
    """Entropy of softmax(logits / temperature) in nats: [T] fp32."""
    return entropy_reference(_tempered(logits, temperature))
