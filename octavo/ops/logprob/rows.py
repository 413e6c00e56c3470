"""Row ops over a chunk of logits where exact is off: log-softmax's statistics, its gradient, and the loss with both."""

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.logprob.reference import cross_entropy_rows_reference, logit_grads_reference, logit_rows_reference


def _fake_rows(logits, targets, inv_temperature, with_entropy):  # type: ignore[no-untyped-def]
    rows = logits.shape[0]
    sizes = (rows, rows, rows if with_entropy else 0)
    return tuple(logits.new_empty(size, dtype=torch.float32) for size in sizes)


def _fake_cross_entropy(grads, logits, targets, ignore_index, z_loss):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


_rows_op = register(
    "logit_rows(Tensor logits, Tensor targets, float inv_temperature, bool with_entropy) -> (Tensor, Tensor, Tensor)",
    reference=logit_rows_reference,
    fake=_fake_rows,
    cuda=kernel_or_reference("logprob.triton.logit_rows", logit_rows_reference),
)
_grads_op = register(
    "logit_grads(Tensor(a!) grads, Tensor logits, Tensor lse, Tensor targets, Tensor weights, Tensor target_weights, "
    "float inv_temperature, int first_col) -> ()",
    reference=logit_grads_reference,
    fake=lambda *_: None,
    cuda=kernel_or_reference("logprob.triton.logit_grads", logit_grads_reference),
)
_cross_entropy_op = register(
    "cross_entropy_rows(Tensor(a!)? grads, Tensor logits, Tensor targets, int ignore_index, float z_loss) -> Tensor",
    reference=cross_entropy_rows_reference,
    fake=_fake_cross_entropy,
    cuda=kernel_or_reference("logprob.triton.cross_entropy_rows", cross_entropy_rows_reference),
)


def _check(logits: torch.Tensor, targets: torch.Tensor) -> None:
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ShapeError(
            f"logits must be [T, V] and targets [T], got {tuple(logits.shape)} and {tuple(targets.shape)}; "
            "flatten the batch first"
        )
    if targets.dtype != torch.int64 or not logits.dtype.is_floating_point:
        raise DtypeError(f"logits must be floating and targets int64, got {logits.dtype} and {targets.dtype}")


def logit_rows(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Statistics of softmax(logits / temperature), row by row, in one read.

    Args:
        logits: [T, V] fp32 or 16 bits.
        targets: [T] int64 within V.
        temperature: > 0.
        with_entropy: the entropy too.
    Returns:
        (logsumexp, log-probability of the target, entropy or None), [T] fp32 each, natural log.
    Exactness: a row's bits depend on that row alone; absolute error about 1e-6 of the largest logit. inf or NaN in a
        row makes it NaN.
    """
    _check(logits, targets)
    lse, logprobs, entropy = _rows_op(logits, targets, 1.0 / temperature, with_entropy)
    return lse, logprobs, entropy if with_entropy else None


def logit_grads(
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    target_weights: torch.Tensor,
    *,
    out: torch.Tensor,
    temperature: float = 1.0,
    first_col: int = 0,
) -> torch.Tensor:
    """softmax * weights - onehot(targets) * target_weights, for the vocabulary's columns from first_col on.

    Args:
        logits: [T, C], those columns' logits.
        lse: [T] fp32 of whole rows, from logit_rows.
        targets: [T] int64.
        weights: [T] fp32; a weight of 0 makes a row 0 but at its target.
        target_weights: [T] fp32.
        out: [T, C], rows contiguous; its dtype is the gradient's, rounded once.
    Returns:
        out.
    """
    _check(logits, targets)
    _grads_op(out, logits, lse, targets, weights, target_weights, 1.0 / temperature, first_col)
    return out


def cross_entropy_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    grads: torch.Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of each row plus z_loss * logsumexp**2, and its gradient by the logits in the same launch.

    Args:
        logits: [T, V] fp32 or 16 bits.
        targets: [T] int64; ignore_index gives a row no loss and no gradient.
        grads: [T, V], rows contiguous, overwritten with the gradient of the sum of losses; None for the loss alone.
    Returns:
        [T] fp32.
    """
    _check(logits, targets)
    return _cross_entropy_op(grads, logits, targets, ignore_index, z_loss)
