"""find_departure: names a planted culprit, layer and operand, and nobody where there is none."""

import copy
import math

import pytest
import torch

from octavo import nn
from octavo.doctor import balanced_sqnr, find_departure
from octavo.errors import RecipeError
from octavo.models import Decoder, ModelConfig
from octavo.numerics import get_recipe

RECIPES = ["tensorwise", "rowwise", "blockwise", "delayed"]


def stack(dtype=torch.float32, width=256, depth=4):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, width)) for _ in range(depth)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(width)).to(dtype)


def loss_of(model, tokens=96):
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(1))
    out = model(x.to(next(model.parameters()).dtype)).float()
    return (out * torch.linspace(-1, 1, 256)).sum() / tokens


def spoil_weight(layer):
    """An outlier in each 16 x 16 block, so that no scale can keep its neighbours."""
    with torch.no_grad():
        layer.weight[::16, ::16] *= 1e7


def test_experts_are_left_out():
    torch.manual_seed(0)
    moe = nn.SparseMoE(256, 128, 4, 2, dtype=torch.bfloat16)
    model = torch.nn.Sequential(nn.Linear(256, 256), moe)
    report = find_departure(model, loss_of, "blockwise")
    assert {row.layer for row in report.rows} == {"0"}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", get_recipe("rowwise", fake_quant=True)])
def test_emulated_recipes_have_no_culprit_either(recipe):
    assert find_departure(stack(), loss_of, recipe).first is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_model_has_no_culprit(recipe, dtype):
    report = find_departure(stack(dtype), loss_of, recipe)
    assert report.first is None
    assert [row.layer for row in report.rows if row.tensor == "output"] == ["0.1", "1.1", "2.1", "3.1"]
    assert [row.layer for row in report.rows if row.tensor == "dgrad"] == ["3.1", "2.1", "1.1", "0.1"]
    own = [row.own_db for row in report.rows]
    assert min(own) > 23.0
    assert all(row.bf16_db > row.fp8_db for row in report.rows if row.tensor in ("output", "wgrad"))
    assert all(row.bf16_db > 35 for row in report.rows if row.tensor in ("output", "wgrad", "dgrad"))
    assert report.losses[0] == pytest.approx(report.losses[1], rel=0.05)
    assert report.losses[2] != report.losses[1]


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8", "nvfp4", get_recipe("rowwise", fake_quant=True)])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_weight_with_huge_outliers_is_named(recipe, layer):
    model = stack()
    spoil_weight(model[layer][1])
    report = find_departure(model, loss_of, recipe)
    assert (report.first.layer, report.first.tensor) == (f"{layer}.1", "weight")
    assert f"layer {layer}.1, operand weight" in report.verdict
    assert report.first.bf16_db > 40


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_an_outlier_channel_of_an_activation_is_named(recipe):
    model = stack()
    with torch.no_grad():
        model[2][0].weight[::128] *= 1e6  # one channel a block
    report = find_departure(model, loss_of, recipe)
    assert (report.first.layer, report.first.tensor) == ("2.1", "activation")


def test_finer_scales_keep_the_outlier_to_its_block():
    model = stack()
    with torch.no_grad():
        model[1][1].weight[0, 0] = 1e6

    def weight_db(recipe):
        rows = find_departure(model, loss_of, recipe).rows
        return next(row.own_db for row in rows if (row.layer, row.tensor) == ("1.1", "weight"))

    assert weight_db("tensorwise") < 1
    assert weight_db("rowwise") > 20


def test_a_gradient_is_named():
    class Unequal(torch.autograd.Function):
        """Gradients of very different sizes, which one scale a tensor cannot hold in E4M3."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.logspace(0, -9, grad.shape[0])[:, None]

    def loss(model):
        x = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
        x = model[2:](Unequal.apply(model[:2](x)))
        return x.square().sum() + x.sum()

    report = find_departure(stack(), loss, get_recipe("tensorwise", fp8_format="e4m3"))
    assert (report.first.layer, report.first.tensor) == ("1.1", "gradient")
    assert find_departure(stack(), loss, "rowwise").first is None


def test_the_model_is_left_as_it_is():
    model = stack()
    before = copy.deepcopy(model.state_dict())
    find_departure(model, loss_of, "delayed")
    assert all(type(model[i][1]) is torch.nn.Linear for i in range(4))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_overrides_and_none_keep_bf16_layers_out():
    model = stack()
    spoil_weight(model[1][1])
    report = find_departure(model, loss_of, "blockwise", overrides={"1.1": "bf16"})
    assert report.first is None
    assert {row.layer for row in report.rows} == {"0.1", "2.1", "3.1"}
    nn.convert(model, "rowwise", overrides={"1.1": "bf16"})
    assert find_departure(model, loss_of, None).recipe == "rowwise"
    with pytest.raises(RecipeError, match="would run in FP8"):
        find_departure(stack(), loss_of, "bf16")


def test_nan_is_a_departure():
    model = stack()
    with torch.no_grad():
        model[3][1].weight[5, 5] = math.nan
    report = find_departure(model, loss_of, "rowwise")
    assert (report.first.layer, report.first.tensor, report.first.own_db) == ("3.1", "weight", -math.inf)
    assert report.as_dict()["first"]["own_db"] == -999.0


def test_errors_that_only_add_up_are_said():
    report = find_departure(stack(), loss_of, "blockwise", threshold_db=26.0)
    assert report.first is None
    assert report.first_accumulated is not None
    assert "no layer departs by itself; errors add up" in report.verdict


def test_a_decoder_with_fused_projections():
    model = Decoder(ModelConfig("llama", 64, 128, 200, 2, 4, 2, 32, max_position_embeddings=64))

    def loss(copied):
        ids = torch.arange(48) % 64
        hidden = copied(ids, nn.PackedContext(torch.tensor([0, 48])))
        return copied.logits(hidden).float().logsumexp(-1).mean()

    assert find_departure(model, loss, "blockwise").first is None
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[::50, ::50] = 1e6
    report = find_departure(model, loss, "blockwise")
    assert (report.first.layer, report.first.tensor) == ("layers.1.mlp.down_proj", "weight")


def test_balanced_sqnr_sees_what_an_outlier_hides():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert balanced_sqnr(x, x) == math.inf
    assert float(balanced_sqnr(x, 1.1 * x)) == pytest.approx(20.0)
    hidden = x.clone()
    hidden[0, 0] = 1e6
    lost = torch.zeros_like(x)
    lost[0, 0] = 1e6
    plain = 10 * math.log10(float(hidden.square().sum() / (hidden - lost).square().sum()))
    assert plain > 80 and float(balanced_sqnr(hidden, lost)) < 0.1
    one_row = x.clone()
    one_row[3] = 0.0
    assert float(balanced_sqnr(x, one_row)) == pytest.approx(10 * math.log10(64), abs=0.5)
    assert balanced_sqnr(x, torch.full_like(x, math.nan)) == -math.inf
