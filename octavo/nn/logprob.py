"""Token log-probabilities straight from hidden states, in chunks; a backward takes the logits where they were kept."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import ShapeError
from octavo.ops import logprob
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.logprob import chunks
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
    tensor_group: TensorGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax(hidden @ head_weight.t() / temperature) at the targets. The training loss is its negative mean.

    Args:
        hidden: [T, hidden_size].
        head_weight: [V, hidden_size].
        targets: [T] int64.
        temperature: > 0.
        exact: the bits that the sampler reports for the same hidden states.
        with_entropy: also return the entropy of each distribution.
        chunk_size: tokens whose logits exist at once (the backward holds as many logits, cut along the vocabulary; none
            are kept); None for 1024 where exact, else for what fits 512 MiB.
        head_bias: [V] or None, added to the logits in fp32.
        tensor_group: ranks that hold the head's rows, each V / size of them in head_weight and head_bias; they gather
            the logits, so that exact logprobs have the bits of one rank. None: all rows are here.
    Returns:
        (logprobs [T] fp32, differentiable in hidden, head_weight and head_bias; entropy [T] fp32, detached, or None).
    Raises:
        ShapeError: if targets are not [T].
    Exactness: exact=True bitwise, whatever the chunk. Otherwise, and in the backward of both, GEMMs in the inputs'
        dtype (fp32 on a CPU) with fp32 logits and sums: absolute error about 1e-5, and gradients of logits are rounded
        once to the inputs' dtype. Whether logits are kept changes no bit of the results, and last bits of gradients.
    Memory: on a GPU, where a gradient is wanted and chunk_size is None, the fp32 logits of all tokens are kept until
        the backward lets go of the graph, if they take at most 4 GiB (T * V * 4 bytes; 8,371 tokens for V = 128256; see
        octavo.ops.logprob.chunks): it does not make them again. Calls whose backwards come later keep theirs together.
        Beside them only chunks exist. Above 4 GiB, under a tensor_group and on a CPU nothing is kept.
    """
    if targets.shape != hidden.shape[:1]:
        raise ShapeError(f"targets must have shape ({hidden.shape[0]},), got {tuple(targets.shape)}")
    keeps = chunk_size is None and tensor_group is None and _needs_gradient(hidden, head_weight, head_bias)
    keeps = keeps and chunks.keeps_logits(hidden.device, chunks.kept_bytes(len(hidden), len(head_weight)))
    logprobs, entropy = _Logprobs.apply(
        hidden, head_weight, head_bias, targets, temperature, with_entropy, chunk_size, exact, tensor_group, keeps
    )
    return logprobs, entropy if with_entropy else None


def _needs_gradient(*inputs: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


class _Logprobs(torch.autograd.Function):
    """The logsumexp [T] is saved, and the logits where `keeps`; else the backward makes them again, by a library in
    exact mode too.
    """

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
        tensor_group: TensorGroup | None,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = hidden, head_weight, targets, temperature, with_entropy, chunk_size, keeps, head_bias
        if exact or tensor_group is not None:
            lse, logprobs, entropy, kept = _chunked_logprobs(*arguments, exact, tensor_group)
        else:
            lse, logprobs, entropy, logits = linear_logprobs(*arguments)
            kept = [logits] if keeps else []
        ctx.save_for_backward(hidden, head_weight, head_bias, targets, lse, *kept)
        ctx.temperature, ctx.chunk_size, ctx.tensor_group = temperature, None if exact else chunk_size, tensor_group
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, head_weight, head_bias, targets, lse, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needed = (ctx.temperature, needs_hidden, needs_weight, ctx.chunk_size, head_bias, kept)
        group = ctx.tensor_group
        own = targets if group is None else targets - group.rank * head_weight.shape[0]  # those of other ranks are out
        grad_hidden, grad_weight, grad_bias = linear_logprobs_backward(grad, hidden, head_weight, own, lse, *needed)
        if group is not None and needs_hidden:
            grad_hidden = group.sum(grad_hidden)
        grads = (grad_hidden if needs_hidden else None, grad_weight if needs_weight else None)
        return (*grads, grad_bias.to(head_bias.dtype) if needs_bias else None, *[None] * 7)


def _chunked_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    chunk_size: int | None,
    keeps: bool,
    head_bias: torch.Tensor | None,
    exact: bool,
    tensor_group: TensorGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """As linear_logprobs, with the sampler's bits where exact, or of a head whose rows lie on several ranks.

    Kept logits come as the chunks that they were made in.
    """
    tokens, own = hidden.shape[0], head_weight.shape[0]
    num_ranks = 1 if tensor_group is None else tensor_group.size
    # own logits, those of all ranks as they came, and side by side
    step = chunk_size or (EXACT_CHUNK_SIZE if exact else chunks.chunk_len(tokens, 3 * num_ranks * own, 4))
    lse, logprobs = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    entropy = torch.zeros_like(logprobs)
    statistics = _exact_rows if exact else logprob.logit_rows
    kept = []
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        logits = hp_mm(hidden[rows], head_weight, bias=head_bias, out_dtype=torch.float32, exact=exact)
        if tensor_group is not None:
            logits = tensor_group.gather(logits)
        if keeps:
            kept.append(logits)
        found = statistics(logits, targets[rows], temperature=temperature, with_entropy=with_entropy)
        lse[rows], logprobs[rows] = found[:2]
        if found[2] is not None:
            entropy[rows] = found[2]
    return lse, logprobs, entropy, kept


def _exact_rows(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As ops.logprob.logit_rows, with the sampler's bits."""
    logprobs = logprob.token_logprobs(logits, targets, temperature)
    lse = logits.gather(1, targets[:, None])[:, 0] / temperature - logprobs
    return lse, logprobs, logprob.entropy(logits, temperature) if with_entropy else None
