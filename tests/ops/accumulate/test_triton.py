"""The kernel that adds gradients up against torch: every bit, at whole, ragged and unaligned tensors."""

import pytest
import torch

from octavo.ops.accumulate import reference
from octavo.ops.accumulate import triton as kernels
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
# One element, some of a block, several blocks of several chunks, none.
SHAPES = [(1,), (33, 131), (3, kernels.CHUNK), (5, 4097), (0, 7)]
if not is_interpreting():
    SHAPES += [(4096,), (14336, 4096), (151936, 1024)]
DTYPES = {None: "new", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Tensors = list[torch.Tensor]


def make(shapes: list[tuple[int, ...]], dtype: torch.dtype, kind: str = "heavy_tailed") -> Tensors:
    return [generate(kind, shape, dtype, seed=i).to(DEVICE) for i, shape in enumerate(shapes)]


def check(olds: list[torch.Tensor | None], grads: Tensors, in_place: bool = False) -> None:
    found, wanted = ([torch.empty_like(x, dtype=torch.float32) for x in grads] for _ in range(2))
    if in_place:
        found, wanted = ([x.clone() for x in olds if x is not None] for _ in range(2))
    terms = list(zip(found, found if in_place else olds, grads, strict=True))
    assert kernels.add_gradients(terms) == []
    reference.add_gradients(list(zip(wanted, wanted if in_place else olds, grads, strict=True)))
    for ours, theirs in zip(found, wanted, strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.parametrize("grad_dtype", [t for t in DTYPES if t], ids=lambda t: DTYPES[t])
@pytest.mark.parametrize("old_dtype", DTYPES, ids=lambda t: DTYPES[t])
def test_every_dtype(old_dtype: torch.dtype | None, grad_dtype: torch.dtype) -> None:
    grads = make(SHAPES, grad_dtype)
    olds = [None] * len(grads) if old_dtype is None else make(SHAPES, old_dtype, "normal")
    check(list(olds), grads)
    if old_dtype == torch.float32:
        check(list(olds), grads, in_place=True)


def test_what_is_not_finite_and_signs_of_zero() -> None:
    grad = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, -0.0, 3e38], device=DEVICE)
    old = torch.tensor([1.0, -torch.inf, 2.0, -0.0, 0.0, 3e38], device=DEVICE)
    check([old], [grad])
    check([None], [grad])


def test_kinds_in_one_call_and_addresses_that_are_not_aligned() -> None:
    shapes = [(40, 33), (1001,), (7, 4096)]
    grads = [x.flatten()[1:] for x in make(shapes, torch.bfloat16)]
    olds = [None, make(shapes, torch.bfloat16)[1].flatten()[1:], make(shapes, torch.float32)[2].flatten()[1:]]
    check(olds, grads)


def test_what_is_not_dense_is_left_for_torch() -> None:
    grad, own = torch.ones(8, 16, device=DEVICE).t(), torch.zeros(16, 8, device=DEVICE)
    assert len(kernels.add_gradients([(own, own, grad)])) == 1
    assert not own.any()
