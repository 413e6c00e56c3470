"""Adds gradients of many parameters up in fp32, all of them in one launch.

It is no op of torch.library: what it reads are addresses in a table, which a compiler could not see.
"""

from collections.abc import Sequence

import torch

from octavo import env
from octavo.errors import DtypeError, ShapeError
from octavo.ops.accumulate import reference

__all__ = ["add_gradients"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def add_gradients(
    sums: Sequence[torch.Tensor], olds: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor]
) -> None:
    """sums[i] = olds[i] + grads[i] in fp32, element by element.

    Args:
        sums: fp32, any shapes; overwritten.
        olds: what was added up so far, fp32, bf16 or fp16, of sums' shapes; sums[i] itself adds in place, None is
            nothing so far.
        grads: fp32, bf16 or fp16, of sums' shapes and devices.
    Raises:
        ShapeError: the lists or shapes do not fit each other.
        DtypeError: other dtypes.
    Exactness: bitwise what torch adds, on CPU and GPU.
    """
    if not len(sums) == len(olds) == len(grads):
        raise ShapeError(f"sums, olds and grads must be equally many, got {len(sums)}, {len(olds)} and {len(grads)}")
    for own, old, grad in zip(sums, olds, grads, strict=True):
        old = own if old is None else old
        if not own.shape == old.shape == grad.shape:
            shapes = [tuple(x.shape) for x in (own, old, grad)]
            raise ShapeError(f"a gradient must have the shape of its sum, got sum, old and gradient of {shapes}")
        if own.dtype != torch.float32 or old.dtype not in _DTYPES or grad.dtype not in _DTYPES:
            raise DtypeError(
                f"gradients in fp32, bf16 or fp16 add up in fp32, got sum, old and gradient of {own.dtype}, "
                f"{old.dtype} and {grad.dtype}"
            )
    terms = list(zip(sums, olds, grads, strict=True))
    if not env.force_reference() and any(own.is_cuda for own in sums):
        from octavo.ops.accumulate import triton

        terms = triton.add_gradients(terms)
    reference.add_gradients(terms)
