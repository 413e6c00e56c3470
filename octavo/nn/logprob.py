"""Token log-probabilities straight from hidden states, in chunks: the logits of all tokens never exist at once."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.errors import ShapeError
from octavo.ops import logprob
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.logprob.linear import linear_logprobs, linear_logprobs_backward

EXACT_CHUNK_SIZE = 1024  # tokens whose logits exist at once


def token_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    exact: bool = False,
    with_entropy: bool = True,
    chunk_size: int | None = None,
    head_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax(hidden @ head_weight.t() / temperature) at the targets. The training loss is its negative mean.

    Args:
        hidden: [T, hidden_size].
        head_weight: [V, hidden_size].
        targets: [T] int64.
        temperature: > 0.
        exact: the bits that the sampler reports for the same hidden states.
        with_entropy: also return the entropy of each distribution.
        chunk_size: tokens whose logits exist at once (the backward holds as many logits, cut along the vocabulary);
            None for 1024 where exact, else for what fits 512 MiB.
        head_bias: [V] or None, added to the logits in fp32.
    Returns:
        (logprobs [T] fp32, differentiable in hidden, head_weight and head_bias; entropy [T] fp32, detached, or None).
    Raises:
        ShapeError: if targets are not [T].
    Exactness: exact=True bitwise, whatever the chunk. Otherwise, and in the backward of both, GEMMs in the inputs'
        dtype (fp32 on a CPU) with fp32 logits and sums: absolute error about 1e-5, and gradients of logits are rounded
        once to the inputs' dtype.
    """
    if targets.shape != hidden.shape[:1]:
        raise ShapeError(f"targets must have shape ({hidden.shape[0]},), got {tuple(targets.shape)}")
    logprobs, entropy = _Logprobs.apply(
        hidden, head_weight, head_bias, targets, temperature, with_entropy, chunk_size, exact
    )
    return logprobs, entropy if with_entropy else None


class _Logprobs(torch.autograd.Function):
    """Only the logsumexp [T] is saved; the backward makes the logits again, by a library in exact mode too."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        head_bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        chunk_size: int | None,
        exact: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        run = _exact_logprobs if exact else linear_logprobs
        lse, logprobs, entropy = run(hidden, head_weight, targets, temperature, with_entropy, chunk_size, head_bias)
        ctx.save_for_backward(hidden, head_weight, head_bias, targets, lse)
        ctx.temperature, ctx.chunk_size = temperature, None if exact else chunk_size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, head_weight, head_bias, targets, lse = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needed = (ctx.temperature, needs_hidden, needs_weight, ctx.chunk_size, head_bias)
        grad_hidden, grad_weight, grad_bias = linear_logprobs_backward(grad, hidden, head_weight, targets, lse, *needed)
        grads = (grad_hidden if needs_hidden else None, grad_weight if needs_weight else None)
        return (*grads, grad_bias.to(head_bias.dtype) if needs_bias else None, *[None] * 5)


def _exact_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    chunk_size: int | None,
    head_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As linear_logprobs, with the sampler's bits."""
    step = chunk_size or EXACT_CHUNK_SIZE
    logprobs, lse = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    entropy = torch.zeros_like(logprobs)
    for start in range(0, hidden.shape[0], step):
        rows = slice(start, start + step)
        logits = hp_mm(hidden[rows], head_weight, bias=head_bias, out_dtype=torch.float32, exact=True)
        logprobs[rows] = logprob.token_logprobs(logits, targets[rows], temperature)
        lse[rows] = logits.gather(1, targets[rows, None])[:, 0] / temperature - logprobs[rows]
        if with_entropy:
            entropy[rows] = logprob.entropy(logits, temperature)
    return lse, logprobs, entropy
