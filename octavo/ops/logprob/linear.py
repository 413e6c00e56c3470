"""lm_head and log-softmax in one op each, chunk by chunk: all logits exist at once only where a forward keeps them.

Legend: T tokens, H hidden_size, V vocabulary. Logits are fp32 (a bf16 logit of 20 is 0.06 wide, which is what a
policy's update moves it by); their gradients are rounded once to the operands' dtype. A bias [V] is added to them in
fp32; its gradient [V] fp32 is the last result, empty where there is none.
"""

import torch

from octavo.ops._runtime.registry import register
from octavo.ops.logprob.chunks import LOGIT_BYTES, chunk_len, empty_chunk, gemm_dtype, loss_chunks, product
from octavo.ops.logprob.rows import cross_entropy_rows, logit_grads, logit_rows


def _logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    chunk_size: int | None,
    keeps: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last result is the logits [T, V] where `keeps`, else empty; chunks, and so bits, are the same either way."""
    tokens, vocab = hidden.shape[0], weight.shape[0]
    dtype = gemm_dtype(hidden, weight)
    x, w = hidden.to(dtype), weight.to(dtype)
    step = min(chunk_size or chunk_len(tokens, vocab, LOGIT_BYTES), max(tokens, 1))
    logits = empty_chunk(tokens if keeps else step, vocab, torch.float32, hidden.device)
    lse, logprobs = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    entropy = hidden.new_empty(tokens if with_entropy else 0, dtype=torch.float32)
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        out = logits[rows] if keeps else logits[: rows.stop - start]
        chunk = _biased(product(x[rows], w.t(), out=out), bias)  # [C, V]
        lse[rows], logprobs[rows], chunk_entropy = logit_rows(
            chunk, targets[rows], temperature=temperature, with_entropy=with_entropy
        )
        if chunk_entropy is not None:
            entropy[rows] = chunk_entropy
    return lse, logprobs, entropy, logits if keeps else logits.new_empty(0)


def _logprobs_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    temperature: float,
    needs_hidden: bool,
    needs_weight: bool,
    chunk_size: int | None,
    bias: torch.Tensor | None,
    kept: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chunks of the vocabulary: each finishes its rows of grad_weight, and only the small grad_hidden is summed up.

    Args:
        kept: the forward's logits, [*, V] fp32 each, of all tokens in order; they are read alone, so that another
            backward finds them too. Empty where they are to be made again.
    """
    (tokens, width), vocab = hidden.shape, weight.shape[0]
    dtype = gemm_dtype(hidden, weight)
    x, w = hidden.to(dtype), weight.to(dtype)
    max_bytes = None if chunk_size is None else chunk_size * vocab * (LOGIT_BYTES + dtype.itemsize)
    step = chunk_len(vocab, tokens, dtype.itemsize + (0 if kept else LOGIT_BYTES), max_bytes)
    logits = None if kept else empty_chunk(tokens, step, torch.float32, hidden.device)
    grads = empty_chunk(tokens, step, dtype, hidden.device)
    grad_hidden = hidden.new_zeros((tokens, width) if needs_hidden else 0, dtype=torch.float32)
    grad_weight = weight.new_empty((vocab, width) if needs_weight else 0)
    grad_bias = hidden.new_empty(0 if bias is None else vocab, dtype=torch.float32)
    weights = grad.float() / -temperature  # [T]; d logprob / d logit = (onehot - softmax) / temperature
    for start in range(0, vocab, step):
        cols = slice(start, min(start + step, vocab))
        pieces = [each[:, cols] for each in kept]
        if logits is not None:
            own_bias = None if bias is None else bias[cols]
            pieces = [_biased(product(x, w[cols].t(), out=logits[:, : cols.stop - start]), own_bias)]
        g = grads[:, : cols.stop - start]  # [T, C]
        first = 0
        for piece in pieces:
            rows = slice(first, first + piece.shape[0])
            of_rows = lse[rows], targets[rows], weights[rows], weights[rows]
            logit_grads(piece, *of_rows, out=g[rows], temperature=temperature, first_col=start)
            first = rows.stop
        if needs_hidden:
            product(g, w[cols], out=grad_hidden, accumulate=start > 0)
        if needs_weight:
            product(g.t(), x, out=grad_weight[cols])
        if bias is not None:
            torch.sum(g, dim=0, dtype=torch.float32, out=grad_bias[cols])
    return grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    z_loss: float,
    needs_hidden: bool,
    needs_weight: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chunks of tokens, whose whole rows give loss and gradient from one GEMM.

    Every chunk reads and writes all of the fp32 grad_weight, so the gradient's chunk is as long as memory allows and
    the wider logits come in a quarter of it at a time.
    """
    (tokens, width), vocab = hidden.shape, weight.shape[0]
    dtype = gemm_dtype(hidden, weight)
    x, w = hidden.to(dtype), weight.to(dtype)
    needs_bias = bias is not None and needs_weight
    needs_grads = needs_hidden or needs_weight
    step, part = loss_chunks(tokens, vocab, dtype.itemsize if needs_grads else 0, needs_weight)
    logits = empty_chunk(part, vocab, torch.float32, hidden.device)
    grads = empty_chunk(step, vocab, dtype, hidden.device) if needs_grads else None
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    grad_hidden = hidden.new_empty((tokens, width) if needs_hidden else 0, dtype=torch.float32)
    grad_weight = weight.new_empty((vocab, width) if needs_weight else 0, dtype=torch.float32)
    grad_bias = hidden.new_zeros(vocab if needs_bias else 0, dtype=torch.float32)
    if not tokens:
        grad_weight.zero_()
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        for first in range(start, rows.stop, part):
            some = slice(first, min(first + part, rows.stop))
            chunk = _biased(product(x[some], w.t(), out=logits[: some.stop - first]), bias)  # [C / 4, V]
            g = None if grads is None else grads[first - start : some.stop - start]
            losses[some] = cross_entropy_rows(chunk, targets[some], grads=g, ignore_index=ignore_index, z_loss=z_loss)
        if grads is not None and needs_hidden:
            product(grads[: rows.stop - start], w, out=grad_hidden[rows])
        if grads is not None and needs_weight:
            product(grads[: rows.stop - start].t(), x[rows], out=grad_weight, accumulate=start > 0)
        if grads is not None and needs_bias:
            grad_bias += grads[: rows.stop - start].sum(dim=0, dtype=torch.float32)
    return losses.sum(), grad_hidden, grad_weight, grad_bias


def _biased(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """logits [C, V] fp32 with the head's bias [V] added in place."""
    return logits if bias is None else logits.add_(bias.float())


def _fake_logprobs(  # type: ignore[no-untyped-def]
    hidden, weight, targets, temperature, with_entropy, chunk_size, keeps, bias=None
):
    tokens = hidden.shape[0]
    sizes = (tokens, tokens, tokens if with_entropy else 0)
    found = tuple(hidden.new_empty(size, dtype=torch.float32) for size in sizes)
    logits = empty_chunk(tokens, weight.shape[0], torch.float32, hidden.device) if keeps else found[0].new_empty(0)
    return (*found, logits)


def _fake_backward(  # type: ignore[no-untyped-def]
    grad, hidden, weight, targets, lse, temperature, needs_hidden, needs_weight, chunk_size, bias, kept
):
    grad_hidden = torch.empty_like(hidden) if needs_hidden else hidden.new_empty(0)
    grad_weight = torch.empty_like(weight) if needs_weight else weight.new_empty(0)
    return grad_hidden, grad_weight, hidden.new_empty(0 if bias is None else weight.shape[0], dtype=torch.float32)


def _fake_cross_entropy(  # type: ignore[no-untyped-def]
    hidden, weight, targets, ignore_index, z_loss, needs_hidden, needs_weight, bias=None
):
    grads = (
        x.new_empty(x.shape if needed else 0, dtype=torch.float32)
        for x, needed in ((hidden, needs_hidden), (weight, needs_weight))
    )
    needs_bias = bias is not None and needs_weight
    grad_bias = hidden.new_empty(weight.shape[0] if needs_bias else 0, dtype=torch.float32)
    return (hidden.new_empty((), dtype=torch.float32), *grads, grad_bias)


_INPUTS = "Tensor hidden, Tensor weight, Tensor targets"
linear_logprobs = register(
    f"linear_logprobs({_INPUTS}, float temperature, bool with_entropy, int? chunk_size, bool keeps, "
    "Tensor? bias=None) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_logprobs,
    fake=_fake_logprobs,
    cuda=_logprobs,
)
linear_logprobs_backward = register(
    f"linear_logprobs_backward(Tensor grad, {_INPUTS}, Tensor lse, float temperature, bool needs_hidden, "
    "bool needs_weight, int? chunk_size, Tensor? bias, Tensor[] kept) -> (Tensor, Tensor, Tensor)",
    reference=_logprobs_backward,
    fake=_fake_backward,
    cuda=_logprobs_backward,
)
linear_cross_entropy = register(
    f"linear_cross_entropy({_INPUTS}, int ignore_index, float z_loss, bool needs_hidden, bool needs_weight, "
    "Tensor? bias=None) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_cross_entropy,
    fake=_fake_cross_entropy,
    cuda=_cross_entropy,
)
