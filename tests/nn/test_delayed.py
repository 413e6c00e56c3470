"""Delayed scaling in a linear: its scales follow the state machine over forward and backward, and its state travels."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from octavo import nn
from octavo.nn import linear_function
from octavo.numerics import DelayedScaling, Format
from octavo.testing import assert_bitwise, assert_sqnr


def make(**fields):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, parts=(32, 16), dtype=torch.float32)
    linear.recipe = DelayedScaling(**{"amax_history_len": 4, **fields})
    return linear


def train(linear, steps, generator, scale=1.0):
    """Steps with counted versions; returns the amaxes of (input, grad_output) seen."""
    seen = []
    for _ in range(steps):
        x = torch.randn(8, 64, generator=generator) * scale
        grad = torch.randn(8, 48, generator=generator) * scale
        linear(x.requires_grad_()).backward(grad)
        nn.mark_weights_updated(linear)
        seen.append((float(x.detach().abs().max()), float(grad.abs().max())))
    return seen


def test_scales_come_from_the_history(generator):
    linear = make(margin=1)
    assert not list(linear.buffers())
    seen = train(linear, 3, generator)
    assert torch.equal(linear.fp8_quant_scale[:2] > 1, torch.tensor([True, True]))
    train(linear, 1, generator)  # its forward takes over what the third step staged
    amax_x, amax_grad = max(x for x, _ in seen), max(g for _, g in seen)
    expected = torch.tensor([448.0 / 2, 57344.0 / 2]) / torch.tensor([amax_x, amax_grad])
    assert_bitwise(linear.fp8_quant_scale[:2], expected)
    parts = linear.weight.detach().bfloat16().float().split((32, 16))
    expected = torch.stack([torch.tensor(224.0) / p.abs().max() for p in parts])
    assert_bitwise(linear.fp8_quant_scale[2:], expected)


def test_first_step_uses_scale_one(generator):
    linear = make()
    train(linear, 1, generator)
    assert_bitwise(linear.fp8_quant_scale, torch.ones(4))
    assert (linear.fp8_amax_history[0] > 0).all()


def test_evaluation_changes_nothing(generator):
    linear = make()
    train(linear, 2, generator)
    before = {k: v.clone() for k, v in linear.state_dict().items()}
    with torch.no_grad():
        linear(torch.randn(8, 64, generator=generator) * 100)
    for name, value in linear.state_dict().items():
        assert_bitwise(value, before[name], name)


def test_training_after_evaluation_observes_the_weight(generator):
    """Codes that an evaluation made are made again by the next training forward, which takes note of the amax."""
    linear = make()
    train(linear, 2, generator)
    with torch.no_grad():
        linear(torch.randn(8, 64, generator=generator))
    linear(torch.randn(8, 64, generator=generator, requires_grad=True))
    assert (linear.fp8_amax_history[0, 2:] > 0).all()


def test_a_skipped_step_changes_nothing(generator):
    linear = make()
    train(linear, 2, generator)
    linear(torch.zeros(0, 64, requires_grad=True))  # rolls what step 2 staged, stages zeros but for the weight
    linear.fp8_amax_history[0] = 0
    before = linear.fp8_amax_history.clone()
    linear(torch.zeros(0, 64, requires_grad=True))
    assert_bitwise(linear.fp8_amax_history[1:], before[1:])


def test_state_is_plain_buffers_and_loads_before_the_first_forward(generator):
    linear = make(fp8_format=Format.E4M3)
    train(linear, 3, generator)
    state = linear.state_dict()
    assert set(state) == {"weight", "fp8_amax_history", "fp8_quant_scale"}
    assert all(v.dtype == torch.float32 for k, v in state.items() if k != "weight")
    other = make(fp8_format=Format.E4M3)
    other.load_state_dict(state)
    x = torch.randn(8, 64, generator=generator)
    assert_bitwise(other(x).detach(), linear(x).detach())


def test_infinite_gradient_keeps_the_scale(generator):
    linear = make()
    train(linear, 3, generator)
    before = linear.fp8_quant_scale[1].clone()
    x = torch.randn(8, 64, generator=generator, requires_grad=True)
    linear(x).backward(torch.full((8, 48), float("inf")))
    train(linear, 2, generator)
    assert before.isfinite()
    assert linear.fp8_quant_scale[1].isfinite()


@pytest.mark.filterwarnings("ignore:.*meta parameter")  # meta stands for a GPU here
def test_state_stays_fp32_and_follows_the_weight(generator):
    linear = make()
    train(linear, 3, generator)
    before = linear.fp8_quant_scale.clone()
    linear.bfloat16()
    assert linear.weight.dtype == torch.bfloat16
    assert_bitwise(linear.fp8_quant_scale, before)
    elsewhere = make().to("meta")
    elsewhere.load_state_dict(linear.state_dict(), assign=False)
    assert elsewhere.fp8_amax_history.device.type == "meta"  # as a CPU checkpoint into a model on a GPU


def test_another_history_length_keeps_the_scales(generator):
    linear = make()
    train(linear, 3, generator)
    before = linear.fp8_quant_scale.clone()
    linear.recipe = DelayedScaling(amax_history_len=16)
    with torch.no_grad():
        linear(torch.randn(8, 64, generator=generator))
    assert linear.fp8_amax_history.shape == (16, 4)
    assert_bitwise(linear.fp8_quant_scale, before)


def test_training_follows_inference_mode(generator):
    linear = make()
    with torch.inference_mode():
        linear(torch.randn(8, 64, generator=generator))
    train(linear, 2, generator)
    assert (linear.fp8_amax_history != 0).any()


@pytest.mark.parametrize("std", [0.02, 0.001])
def test_a_frozen_weight_is_scaled_from_itself(std, generator):
    """Its codes are made once, before anything was staged: under a scale of 1 a small weight would underflow."""
    linear = nn.Linear(256, 256)
    torch.nn.init.normal_(linear.weight, std=std)
    linear.requires_grad_(False)
    nn.convert(torch.nn.ModuleList([linear]), "delayed")
    x = torch.randn(64, 256, generator=generator).bfloat16().requires_grad_()
    for _ in range(3):
        linear(x).float().sum().backward()
    (codes,) = linear.quantized_weight()
    assert_sqnr(codes.dequantize(), linear.weight, 28.0)


def test_views_of_the_state_follow_its_buffers(generator):
    linear = make()
    train(linear, 2, generator)
    recipe, first = linear.recipe, linear.delayed_state(linear.recipe)
    assert linear.delayed_state(recipe) is first
    known = first.known(0, observe=True)
    assert first.known(0, observe=True) is known
    assert known["quant_scale"].data_ptr() == linear.fp8_quant_scale.data_ptr()

    linear.fp8_amax_history = linear.fp8_amax_history.clone()  # another tensor
    second = linear.delayed_state(recipe)
    assert second is not first and second.history is linear.fp8_amax_history
    linear.fp8_quant_scale.data = linear.fp8_quant_scale.data.clone()  # the same tensor elsewhere
    third = linear.delayed_state(recipe)
    assert third.known(1, observe=False)["quant_scale"].data_ptr() == linear.fp8_quant_scale[1].data_ptr()
    longer = DelayedScaling(amax_history_len=7)
    assert linear.delayed_state(longer).history.shape[0] == 7
    linear.to(torch.bfloat16)
    assert linear.delayed_state(longer).history is linear.fp8_amax_history


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_a_state_of_their_own(how, generator):
    linear = make()
    train(linear, 2, generator)
    other = copy.deepcopy(linear) if how == "deepcopy" else pickle.loads(pickle.dumps(linear))
    before = linear.fp8_amax_history.clone()
    train(other, 1, generator)
    assert_bitwise(linear.fp8_amax_history, before)
    state = other.delayed_state(other.recipe)
    assert state.history is other.fp8_amax_history
    assert state.known(0, observe=True)["amax_out"].data_ptr() == other.fp8_amax_history.data_ptr()


def test_reentrant_checkpointing_is_said():
    """Its forward has no gradients, so that no step of delayed scaling begins."""
    linear_function.warn_of_reentrant_checkpointing.cache_clear()
    x = torch.randn(8, 64, requires_grad=True)
    out = checkpoint(make(), x, use_reentrant=True)
    with pytest.warns(UserWarning, match="reentrant activation checkpointing"):
        out.sum().backward()
    linear_function.warn_of_reentrant_checkpointing.cache_clear()
    checkpoint(make(), x, use_reentrant=False).sum().backward()  # a warning would be an error
    nn.checkpoint(make(), x).sum().backward()
