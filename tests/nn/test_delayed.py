"""Delayed scaling in a linear: its scales follow the state machine over forward and backward, and its state travels."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from octavo import nn
from octavo.nn.amax_watch import speak_again
from octavo.nn.delayed import warn_of_eval_mode
from octavo.numerics import DelayedScaling, get_recipe
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_all_bitwise


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
    before = {k: v.clone() for k, v in nn.fp8_state_dict(linear).items()}
    with torch.no_grad():
        linear(torch.randn(8, 64, generator=generator) * 100)
    assert len(before) == 2
    for name, value in nn.fp8_state_dict(linear).items():
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
    moved = make().to("meta")
    nn.load_fp8_state_dict(moved, nn.fp8_state_dict(linear))
    assert moved.fp8_amax_history.device.type == "meta"  # as a CPU checkpoint into a model on a GPU


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
    assert linear.delayed_state(recipe) is first and first.known(0, observe=True) is first.known(0, observe=True)
    linear.fp8_amax_history = linear.fp8_amax_history.clone()  # another tensor
    assert linear.delayed_state(recipe).history is linear.fp8_amax_history
    linear.fp8_quant_scale.data = linear.fp8_quant_scale.data.clone()  # the same tensor at another address
    known = linear.delayed_state(recipe).known(1, observe=False)
    assert known["quant_scale"].data_ptr() == linear.fp8_quant_scale[1].data_ptr()
    linear.to(torch.bfloat16)
    assert linear.delayed_state(recipe).history is linear.fp8_amax_history


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_a_state_of_their_own(how, generator):
    linear = make()
    train(linear, 2, generator)
    other = copy.deepcopy(linear) if how == "deepcopy" else pickle.loads(pickle.dumps(linear))
    before = linear.fp8_amax_history.clone()
    train(other, 1, generator)
    assert_bitwise(linear.fp8_amax_history, before)
    assert other.delayed_state(other.recipe).history is other.fp8_amax_history


KINDS = {
    "linear": lambda dtype: nn.Linear(64, 48, parts=(32, 16), dtype=dtype),
    "norm_linear": lambda dtype: nn.LayerNormLinear(64, 64, dtype=dtype),
    "norm_mlp": lambda dtype: nn.LayerNormMLP(64, 128, dtype=dtype),
    "moe": lambda dtype: nn.SparseMoE(64, 64, 4, 2, dtype=dtype),
}


def make_module(kind, dtype):
    torch.manual_seed(0)
    model = KINDS[kind](dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    nn.convert(torch.nn.ModuleList([model]), DelayedScaling(amax_history_len=4))
    return model


@pytest.mark.parametrize("kind", ["linear", "norm_mlp", "moe"])
def test_reentrant_checkpointing_equals_none(kind):
    """Its first forward has no gradients: what its recomputation stages is taken over by the next one."""

    def run(is_checkpointed):
        model = make_module(kind, torch.float32)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            out = checkpoint(model, x, use_reentrant=True) if is_checkpointed else model(x)
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            found += [out.detach(), x.grad]
        return found, nn.fp8_state_dict(model)

    (found, state), (expected, straight) = run(True), run(False)
    assert any(key.endswith("fp8_awaits_update") for key in state)  # a resumed run takes over what is staged as well
    assert_all_bitwise(found, expected)
    for key, value in straight.items():
        assert_bitwise(state[key], value, key)
    assert all(value[0] != 1.0 for key, value in straight.items() if key.endswith("scale"))


@pytest.mark.parametrize("fields", [{}, {"fake_quant": True}])
def test_eval_mode_stages_nothing(fields, generator):
    """With gradients neither, and the backward goes by the mode of its forward."""
    linear = make()
    linear.recipe = get_recipe("delayed", amax_history_len=4, **fields)
    train(linear, 3, generator)
    before = {key: value.clone() for key, value in nn.fp8_state_dict(linear).items()}
    linear.eval()
    out = linear(100 * torch.randn(8, 64, generator=generator, requires_grad=True))
    linear.train()
    out.sum().backward()
    assert_all_bitwise(nn.fp8_state_dict(linear).values(), before.values())
    out = linear(torch.randn(8, 64, generator=generator, requires_grad=True))
    linear.eval()
    out.sum().backward()
    assert linear.fp8_amax_history[0, 1] == 1.0, "its forward was in training mode"


@pytest.mark.parametrize("kind", ["norm_linear", "norm_mlp", "moe"])
def test_eval_mode_stages_nothing_in_fused_modules(kind, generator):
    model = make_module(kind, torch.bfloat16)
    x = torch.randn(128, 64, generator=generator).bfloat16().requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    before = {key: value.clone() for key, value in nn.fp8_state_dict(model).items()}
    assert before
    model.eval()
    model(100 * x).sum().backward()
    assert_all_bitwise(nn.fp8_state_dict(model).values(), before.values())


def test_training_in_eval_mode_is_said(generator):
    warn_of_eval_mode.cache_clear()
    linear, x = make().eval(), torch.randn(8, 64, generator=generator, requires_grad=True)
    with pytest.warns(UserWarning, match=r"its scales are still 1.*model.train\(\)"):
        linear(x)
    linear(x)  # once
    warn_of_eval_mode.cache_clear()
    trained = make()
    train(trained, 2, generator)
    trained.eval()(x)


def spike(model, generator, steps=40):
    """Ordinary steps around one that is 10^6 times larger."""
    for step in range(steps):
        x = torch.randn(8, 64, generator=generator) * (1e6 if step == 1 else 1.0)
        model(x.requires_grad_()).sum().backward()


def lost_share(linear):
    """Of an ordinary input: what becomes zero."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return float(((x * linear.fp8_quant_scale[0]).to(torch.float8_e4m3fn).float() == 0).float().mean())


def test_a_scale_lost_to_a_spike_is_said_once_and_reset(generator):
    speak_again()
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 8))
    nn.convert(model, "delayed")
    said = r"delayed scaling of 0: the scale of its input .* [\d.e+]+ times.*reset_amax_history.*most_recent.*shorter"
    with pytest.warns(UserWarning, match=said) as warned:
        spike(model, generator)
    assert len(warned) == 1
    assert lost_share(model[0]) > 0.3
    nn.reset_amax_history(model)
    spike(model, generator, steps=1)
    spike(model, generator, steps=1)
    assert lost_share(model[0]) < 0.01


@pytest.mark.parametrize("fields", [{"amax_compute_algo": "most_recent"}, {"amax_history_len": 8}])
def test_recipes_that_forget_need_no_warning(fields, generator):
    speak_again()
    linear = make()
    linear.recipe = DelayedScaling(**fields)
    spike(linear, generator)  # a warning would be an error
    assert lost_share(linear) < 0.01
