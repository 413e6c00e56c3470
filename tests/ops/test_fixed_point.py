"""Exact sums: integers times powers of two, and sums that no order changes."""

import pytest
import torch

from octavo.numerics.fixed_point import bits_for_dot, exact_sum, to_fixed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_to_fixed_is_exact_near_the_largest(dtype, generator):
    x = torch.rand(7, 300, generator=generator).add(1.0).to(dtype).clamp_max(1.99)  # one binade
    integers, unit = to_fixed(x, 24)
    assert torch.equal(integers * unit, x.double())
    assert (integers.abs() <= 2**24).all()
    assert torch.equal(integers, integers.round())


def test_to_fixed_error_is_half_a_unit(generator):
    x = torch.randn(5, 1000, generator=generator) * torch.logspace(-12, 3, 1000)
    integers, unit = to_fixed(x, 20)
    assert ((integers * unit - x.double()).abs() <= unit / 2).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38, -(2.0**-149)])
def test_to_fixed_extremes(value):
    integers, unit = to_fixed(torch.full((1, 3), value), 24)
    assert torch.equal((integers * unit).float(), torch.full((1, 3), value))


def test_non_finite_is_not_hidden():
    for bad in (float("inf"), float("nan")):
        integers, unit = to_fixed(torch.tensor([[1.0, bad]]), 24)
        assert not (integers * unit).isfinite().all()


def test_exact_sum_ignores_order_and_padding(generator):
    x = torch.randn(4, 1001, generator=generator) * torch.logspace(-6, 6, 1001)
    expected = exact_sum(x, 40)
    for seed in range(5):
        order = torch.randperm(1001, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(exact_sum(x[:, order], 40), expected)
    assert torch.equal(exact_sum(torch.nn.functional.pad(x, (0, 77)), 40), expected)
    plain = {x[:, torch.randperm(1001)].sum(-1).numpy().tobytes() for _ in range(20)}
    assert len(plain) > 1  # the control: an ordinary fp32 sum does depend on order


@pytest.mark.parametrize(("terms", "bits"), [(1, 24), (32, 24), (128, 23), (4096, 20), (1 << 17, 18)])
def test_bits_for_dot(terms, bits):
    assert bits_for_dot(terms) == bits
    assert 2 * bits_for_dot(terms) + (terms - 1).bit_length() <= 53
