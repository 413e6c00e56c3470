"""The switches of a recipe: one GEMM in high precision, fake quantization; each changes what it says and no more."""

import pytest
import torch

from octavo import nn
from octavo.nn.statistics import TensorStatistics
from octavo.numerics import get_recipe
from octavo.numerics.analysis import sqnr
from octavo.numerics.recipe import GEMMS
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.quantize import quantize, quantize_columns
from octavo.testing import assert_bitwise
from tests.recipes import FP8_RECIPES as RECIPES


def run(recipe, dtype=torch.bfloat16, device="cpu", steps=2, parts=None):
    """One linear's (output, grad_input, grad_weight) by name, at the last of some steps with the same inputs."""
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (torch.randn(shape, generator=generator) for shape in ((72, 160), (72, 224), (224, 160)))
    layer = nn.Linear(160, 224, bias=True, parts=parts, dtype=dtype, device=device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    layer.recipe = recipe
    for _ in range(steps):
        layer.weight.grad = None
        source = x.to(device, dtype, copy=True).requires_grad_()
        out = layer(source)
        out.backward(grad.to(device, dtype))
    return {"output": out.detach(), "grad_input": source.grad, "grad_weight": layer.weight.grad}, layer


CASES = {recipe: (recipe, {}, None) for recipe in RECIPES}
CASES["parts"] = ("blockwise", {}, (100, 124))  # that end in ragged blocks are quantized one by one
CASES["fake_quant"] = ("blockwise", {"fake_quant": True}, None)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("case", CASES)
def test_one_gemm_in_high_precision(case, gemm, device):
    """It becomes bf16's, from high-precision operands; the other two stay FP8's, bit for bit."""
    recipe, fields, parts = CASES[case]
    switched = get_recipe(recipe, high_precision_gemms=(gemm,), **fields)
    asked = (get_recipe(recipe, **fields), get_recipe("bf16"), switched)
    fp8, plain, found = (run(each, device=device, parts=parts)[0] for each in asked)
    for name in GEMMS:
        assert not torch.equal(fp8[name], plain[name])
        assert_bitwise(found[name], (plain if name == gemm else fp8)[name], name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_gemms_in_high_precision_is_bf16(recipe):
    switched, plain = run(get_recipe(recipe, high_precision_gemms=GEMMS))[0], run(get_recipe("bf16"))[0]
    for name in GEMMS:
        assert_bitwise(switched[name], plain[name], name)


@pytest.mark.parametrize("gemm", GEMMS)
def test_delayed_scaling_keeps_learning(gemm):
    """A GEMM in high precision changes no amax of the operands that the others still quantize."""
    _, fp8 = run(get_recipe("delayed"), steps=3)
    _, switched = run(get_recipe("delayed", high_precision_gemms=gemm), steps=3)
    if gemm == "output":  # its input and weight are quantized for the backward alone
        assert_bitwise(switched.fp8_quant_scale[:2], fp8.fp8_quant_scale[:2])
    else:
        assert_bitwise(switched.fp8_quant_scale, fp8.fp8_quant_scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fake_quant_is_the_formats_error_alone(recipe, device):
    """Same codes, GEMMs of decoded operands: what FP8 GEMMs give but for the order and precision of their sums."""
    asked = (get_recipe(recipe), get_recipe("bf16"), get_recipe(recipe, fake_quant=True))
    fp8, plain, fake = (run(each, torch.float32, device)[0] for each in asked)
    for name in GEMMS:
        assert sqnr(fp8[name], fake[name]) > 45, name
        assert 22 < sqnr(plain[name], fake[name]) < 35, name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_fake_quant_multiplies_decoded_operands(recipe, device):
    fake, layer = run(get_recipe(recipe, fake_quant=True), torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(device) for shape in ((72, 160), (72, 224)))
    r, weight = get_recipe(recipe), layer.weight.detach().bfloat16()
    operands = {
        "output": (quantize(x, r.input), quantize(weight, r.weight)),
        "grad_input": (quantize(grad, r.grad_output), quantize_columns(weight, r.weight)),
        "grad_weight": (quantize_columns(grad, r.grad_output), quantize_columns(x, r.wgrad_input)),
    }
    for name, (a, b) in operands.items():
        bias = layer.bias.detach() if name == "output" else None
        assert sqnr(hp_mm(a.dequantize(), b.dequantize(), bias=bias), fake[name]) > 90, name


def test_switches_by_override():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    no_wgrad = get_recipe("blockwise", high_precision_gemms="grad_weight")
    nn.convert(model, "blockwise", overrides={"1": no_wgrad})
    assert model[0].recipe.high_precision_gemms == ()
    assert model[1].recipe.high_precision_gemms == ("grad_weight",)
    statistics = TensorStatistics(model, stats=("mse", "max"))
    model(torch.randn(8, 64)).sum().backward()
    statistics.step()
    measured = {(row.layer, row.tensor): row.values for row in statistics.rows()}
    assert "mse" in measured["1", "gradient"], "dgrad still multiplies its codes"
