"""FP8-only weights: frozen linears that give up their high-precision copy."""

import warnings

import pytest
import torch

import octavo
from octavo import nn
from octavo.errors import ConfigError, RecipeError
from octavo.models import ModelConfig
from octavo.testing import assert_bitwise
from tests.assertions import assert_raises


def build(recipe):
    torch.manual_seed(0)
    module = nn.LayerNormMLP(256, 384, activation="swiglu", bias=False, normalization="RMSNorm")
    octavo.convert(module, recipe)
    return module


def step(module, x):
    x = x.detach().requires_grad_()
    out = module(x)
    out.float().square().mean().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_forward_and_gradient_stay(recipe, generator, device):
    module = build(recipe).to(device)
    x = torch.randn(64, 256, generator=generator).to(device, torch.bfloat16)
    for parameter in module.parameters():
        parameter.requires_grad_(parameter is module.norm.weight)
    for _ in range(2):
        step(module, x)
    nn.set_fusion(module, False)  # as layers of codes run too
    with torch.no_grad():
        wanted = module(x)
    num_bytes = sum(linear.weight.nbytes for linear in (module.fc1, module.fc2))
    assert nn.keep_codes_only(module) == num_bytes
    with torch.no_grad():
        assert_bitwise(module(x), wanted)
    assert [name for name, _ in module.named_parameters()] == ["norm.weight"]
    _, grad = step(module, x)
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0
    assert nn.keep_codes_only(module) == 0


def test_trained_linears_keep_their_weight():
    module = build("blockwise")
    with pytest.warns(
        UserWarning, match=r"kept all 2 weights of linears in FP8, .*model.requires_grad_\(False\) first"
    ):
        assert nn.keep_codes_only(module) == 0
    assert module.fc1.weight is not None
    module.fc1.weight.requires_grad = False
    assert nn.keep_codes_only(module) == module.fc1.in_features * module.fc1.out_features * 2
    assert nn.keep_codes_only(module) == 0  # and no warning: fc2 is trained, as adapters are


def test_codes_that_no_backward_takes_are_said_where_something_trains():
    for trained in (False, True):
        module = build("rowwise").requires_grad_(False)
        module.norm.weight.requires_grad = trained
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nn.keep_codes_only(module)
        assert [str(each.message)[:80] for each in caught] == (
            ["keep_codes_only kept codes of 2 linears which no backward can transpose, and oth"] if trained else []
        )
    with pytest.raises(RecipeError, match="a backward with such scales needs the high-precision weight"):
        step(module, torch.randn(8, 256).bfloat16())


def test_a_state_dict_without_the_codes_is_said_and_an_export_has_them(generator):
    model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Linear(128, 128)).bfloat16().requires_grad_(False)
    nn.convert(model, "rowwise", ignore=("1",))
    model.state_dict()
    nn.keep_codes_only(model)
    with pytest.warns(UserWarning, match=r"no weight of a linear that holds FP8 codes only.*torch\.export"):
        assert sorted(model.state_dict()) == ["0.bias", "1.bias", "1.weight"]
    x = torch.randn(4, 256, generator=generator).bfloat16()
    exported = torch.export.export(model, (x,))
    assert_bitwise(exported.module()(x), model(x))
    assert torch.float8_e4m3fn in {tensor.dtype for tensor in exported.constants.values()}


def test_former_names_are_taken_for_one_release():
    module = build("blockwise").requires_grad_(False)
    with pytest.warns(DeprecationWarning, match="use octavo.nn.keep_codes_only"):
        assert nn.freeze_to_fp8(module) > 0
    config = ModelConfig("llama", 32, 32, 32, 1, 1, 1, 32)
    with pytest.warns(DeprecationWarning, match="use keep_codes_only"), pytest.raises(ConfigError, match="trainable"):
        octavo.load_model(config, trainable=True, codes_only=True)


def test_row_scales_cannot_send_gradients_back(generator):
    module = build("rowwise")
    module.requires_grad_(False)
    nn.keep_codes_only(module)
    x = torch.randn(8, 256, generator=generator).bfloat16().requires_grad_()
    assert_raises(RecipeError, "blockwise", module(x).float().sum().backward)


def test_high_precision_has_no_codes():
    assert_raises(RecipeError, "no codes", nn.Linear(64, 64).keep_codes_only)


def test_a_linears_name_and_its_weights_kind_outlive_its_source():
    """convert names a linear, and a sharded weight's codes are never pinned: also where another source takes over."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16))
    nn.convert(module, "rowwise")
    module[0].source.is_sharded = True
    module.float()  # moves and casts begin with an empty source
    assert module[0].full_name == "0" and module[0].source.is_sharded
    module[0].keep_codes_only()
    assert module[0].full_name == "0"
