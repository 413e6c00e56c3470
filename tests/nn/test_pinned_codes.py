"""Pinned codes: new ones are made where the old ones are, for both layouts at once where a backward read the last."""

import copy

import pytest
import torch

from octavo import nn
from octavo.nn.live_weights import renew_codes
from octavo.nn.weights import operands
from octavo.numerics import get_recipe
from octavo.testing import assert_bitwise
from tests.assertions import assert_codes, assert_raises
from tests.recipes import FP8_RECIPES as RECIPES

PARTS = [(384,), (256, 128), (200, 100, 84)]


def make(recipe, parts=(384,), device="cpu"):
    torch.manual_seed(1)
    linear = nn.Linear(256, sum(parts), parts=parts, device=device)
    linear.set_recipe(get_recipe(recipe))
    return linear


def change(linear):
    with torch.no_grad():
        linear.weight.mul_(-1.5).add_(0.01)
    nn.mark_weights_updated(linear)


def train(linear, num_micro_batches=2):
    x = torch.ones(16, 256, dtype=torch.bfloat16, device=linear.weight.device, requires_grad=True)
    for _ in range(num_micro_batches):
        linear(x).sum().backward()


def places(linear):
    return {name: (t.data_ptr(), t.shape, t.stride()) for name, t in nn.live_tensors(linear).items()}


def make_pinned(recipe, parts=(384,), device="cpu"):
    """A linear whose codes are pinned, and their places."""
    linear = make(recipe, parts, device)
    nn.pin_codes(linear)
    return linear, places(linear)


def check_codes(linear, *, is_trained):
    """Those of a linear that has never had others."""
    fresh = copy.deepcopy(linear)
    pairs = [(linear.forward_operands(linear.recipe), fresh.forward_operands(linear.recipe))]
    if is_trained:
        pairs.append((linear.backward_operands(linear.recipe), fresh.backward_operands(linear.recipe)))
    whole, other = (m.source.whole(m.weight, m.plan_for(linear.recipe)) for m in (linear, fresh))
    if other is not None:
        pairs.append(([(None, whole)], [(None, other)]))
    for ours, theirs in pairs:
        assert [rows for rows, _ in ours] == [rows for rows, _ in theirs]
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            assert_codes(a, b)


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_new_codes_are_made_in_place(recipe, parts, calls, device):
    linear, held = make_pinned(recipe, parts, device)
    for _ in range(2):
        change(linear)
        calls.clear()
        renew_codes(linear)
        assert calls and set(calls) == {("quantize", True)}
        assert places(linear) == held
        calls.clear()
        nn.pin_codes(linear)
        assert not calls and places(linear) == held
        check_codes(linear, is_trained=False)


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trained_linears_codes_come_both_ways(recipe, parts, calls, device):
    """One quantization where the ranges are one; the next step, forward and backward, finds all that it needs."""
    linear, held = make_pinned(recipe, parts, device)
    train(linear)
    change(linear)
    calls.clear()
    renew_codes(linear)
    is_one = recipe != "delayed" and len(linear.forward_operands(linear.recipe)) == 1
    if is_one:
        assert calls == [("quantize_both", True)]
        calls.clear()
        train(linear)
        assert not calls
    else:
        assert set(calls) == {("quantize", True)}
    assert places(linear) == held
    if recipe != "delayed":  # whose scales go on with each step
        check_codes(linear, is_trained=True)


def test_codes_that_met_no_forward_wait_for_the_backward(calls):
    """In a step of one micro-batch they would be there when memory is fullest, which they were not before."""
    linear, _ = make_pinned("blockwise")
    for num_micro_batches, expected in ((1, "quantize"), (2, "quantize_both"), (1, "quantize_both")):
        train(linear, num_micro_batches)
        change(linear)
        calls.clear()
        renew_codes(linear)
        assert calls == [(expected, True)]


def test_layouts_that_are_not_read_are_not_made_again(calls):
    linear = make("blockwise")
    train(linear)
    for expected in ("quantize_both", "quantize", "quantize"):
        change(linear)
        calls.clear()
        renew_codes(linear)
        assert [name for name, _ in calls] == [expected]
    assert linear.source._backward is None


def test_a_training_forward_writes_in_place(calls):
    linear, _ = make_pinned("blockwise")
    held = places(linear)
    for _ in range(2):
        change(linear)
        calls.clear()
        train(linear)
        assert calls == [("quantize_both", True)] and places(linear) == held
        check_codes(linear, is_trained=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_experts_codes_are_renewed(recipe):
    """Their backward has a layout of its own, which it makes itself."""
    experts = nn.GroupedLinear(256, 128, 4)
    experts.set_recipe(get_recipe(recipe))
    nn.pin_codes(experts)
    held = places(experts)
    experts.backward_operands(experts.recipe)
    change(experts)
    renew_codes(experts)
    assert experts.source._backward is None and places(experts) == held
    fresh = copy.deepcopy(experts)
    for name in ("forward_operands", "backward_operands"):
        ours, theirs = (getattr(m, name)(experts.recipe) for m in (experts, fresh))
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            assert_codes(a, b)


@pytest.mark.parametrize("was_trained", [False, True])
def test_a_quantization_that_fails_is_made_up_for(was_trained, monkeypatch):
    linear, _ = make_pinned("blockwise")
    held = places(linear)
    if was_trained:
        train(linear)
    change(linear)
    with monkeypatch.context() as broken:
        for name in ("quantize", "quantize_both"):
            broken.setattr(operands, name, lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory")))
        assert_raises(RuntimeError, "no memory", renew_codes, linear)
    renew_codes(linear)
    assert places(linear) == held
    check_codes(linear, is_trained=was_trained)


def test_another_recipes_codes_leave_pinned_ones_alone():
    """Of the same sizes and another meaning: who goes by the addresses must not read them."""
    linear, _ = make_pinned("blockwise")
    pinned = [q for _, q in linear.forward_operands(linear.recipe)]
    before = pinned[0].qdata.view(torch.uint8).clone(), pinned[0].scale.clone()
    linear.forward_operands(get_recipe("blockwise", scale_format="e8m0"))
    assert_bitwise(pinned[0].qdata.view(torch.uint8), before[0])
    assert_bitwise(pinned[0].scale, before[1])


def test_codes_only_have_nothing_to_renew(calls):
    linear = make("blockwise")
    linear.keep_codes_only()
    calls.clear()
    held = linear.quantized_weight()
    assert all(a is b for a, b in zip(renew_codes(linear), held, strict=True)) and not calls
    linear = make("bf16")
    assert renew_codes(linear) == [] and not calls
