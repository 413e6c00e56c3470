"""Sums of gradients are fp32 additions, in place or into a new tensor; what does not fit is refused."""

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.ops.accumulate import add_gradients
from tests.assertions import assert_raises


def test_what_a_sum_is() -> None:
    old, grad = torch.tensor([1.0, -0.0], dtype=torch.bfloat16), torch.tensor([2.0**-12, -0.0], dtype=torch.bfloat16)
    first, second = (torch.full((2,), torch.nan) for _ in range(2))
    add_gradients([first, second], [None, old], [grad, grad])
    assert first.tolist() == [2.0**-12, 0.0] and first.signbit().tolist() == [False, True]
    assert second.tolist() == [1.0 + 2.0**-12, 0.0]  # which bf16 cannot hold
    add_gradients([second], [second], [grad])
    assert second.tolist() == [1.0 + 2.0**-11, 0.0]
    add_gradients([], [], [])


def test_what_is_refused() -> None:
    x, half = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    assert_raises(ShapeError, "must be equally many, got 1, 0 and 1", add_gradients, [x], [], [x])
    for old, grad in ((None, torch.zeros(3)), (torch.zeros(1), x)):
        assert_raises(ShapeError, "a gradient must have the shape of its sum", add_gradients, [x], [old], [grad])
    for own, old, grad in ((half, None, half), (x, x.double(), half), (x, x, x.double())):
        assert_raises(DtypeError, "gradients in fp32, bf16 or fp16 add up", add_gradients, [own], [old], [grad])
