"""An infinite weight, input or gradient of a linear in FP8 sets the flag that a trainer reads, and changes no code."""

import pytest
import torch

import octavo
from octavo import nn
from octavo.errors import NonFiniteError
from octavo.nn.finite_weights import check_finite_weights
from octavo.numerics.infinity import take_infinity
from tests.assertions import assert_raises

RECIPES = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES)
CPU = torch.device("cpu")
MODULES = {
    "plain": lambda: torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)),
    "LayerNormLinear": lambda: nn.LayerNormLinear(128, 256, parts=(128, 128)),
    "LayerNormMLP": lambda: nn.LayerNormMLP(128, 256, normalization="RMSNorm", activation="swiglu"),
}


@pytest.fixture(autouse=True)
def clear_flag() -> None:
    take_infinity(CPU)


def saw_infinity() -> bool:
    return bool(take_infinity(CPU).item())


def linear(recipe: str) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(128, 128, dtype=torch.float32)
    octavo.convert(made, recipe)
    return made


@ALL_RECIPES
@pytest.mark.parametrize("operand", ["none", "weight", "input", "grad_output"])
def test_each_operand_of_a_linear(recipe: str, operand: str) -> None:
    layer, x = linear(recipe), torch.randn(32, 128)
    grad = torch.randn(32, 128)
    with torch.no_grad():
        target = {"weight": layer.weight, "input": x, "grad_output": grad}.get(operand)
        if target is not None:
            target[3, 5] = torch.inf
    out = layer(x.requires_grad_())
    out.backward(grad)
    if not recipe.startswith("nv"):  # what is hidden: no number shows the infinity
        assert all(t.isfinite().all() for t in (out, x.grad, layer.weight.grad))
    assert saw_infinity() == (operand != "none")
    layer(x.detach())
    is_kept = recipe in RECIPES[:4]  # of the weight's codes
    assert saw_infinity() == (operand == "input" or (operand == "weight" and not is_kept))


@pytest.mark.parametrize("recipe", RECIPES[:4])
@pytest.mark.parametrize("name", MODULES)
def test_any_weight_of_fused_modules(name: str, recipe: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().to(torch.bfloat16)
    octavo.convert(module, recipe)
    x = torch.randn(32, 128).bfloat16()
    weights = [p for p in module.parameters() if p.dim() == 2]
    module(x).float().sum().backward()
    assert not saw_infinity()
    for weight in weights:
        with torch.no_grad():
            before, weight[-1, -1] = weight[-1, -1].clone(), -torch.inf
        module(x).float().sum().backward()
        assert saw_infinity()
        with torch.no_grad():
            weight[-1, -1] = before


@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_experts(recipe: str) -> None:
    torch.manual_seed(0)
    experts = nn.GroupedLinear(128, 128, 2)
    octavo.convert(experts, recipe)
    with torch.no_grad():
        experts.weight.normal_()
    offsets, x = torch.tensor([128, 256], dtype=torch.int32), torch.randn(256, 128).bfloat16().requires_grad_()
    experts(x, offsets).float().sum().backward()
    assert not saw_infinity()
    grad = torch.ones(256, 128).bfloat16()
    grad[-1, -1] = torch.inf
    experts(x, offsets).backward(grad)
    assert saw_infinity()


@pytest.mark.parametrize("how", ["checkpoint", "compile", "autocast"])
def test_wherever_a_linear_runs(how: str) -> None:
    layer = torch.nn.Linear(128, 128)
    x = torch.randn(32, 128)
    if how != "autocast":
        layer = linear("blockwise")
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if how == "compile" else layer

    def forward() -> torch.Tensor:
        if how == "checkpoint":
            return nn.checkpoint(layer, x.clone().requires_grad_())
        with octavo.autocast(recipe="rowwise", enabled=how == "autocast"):
            return run(x)

    if how == "compile":
        forward = lambda: run(x)  # noqa: E731
    forward().sum().backward()
    assert not saw_infinity()
    with torch.no_grad():
        layer.weight[0, 0] = torch.inf
    forward().sum().backward()
    assert saw_infinity()


def test_weights_are_refused_by_name() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    check_finite_weights(model)
    with torch.no_grad():
        model[0].weight.fill_(3e38)  # the screen's sum overflows, the weights do not
    check_finite_weights(model)
    with torch.no_grad():
        model[2].weight[1, 1], model[3].bias[0] = torch.inf, torch.nan
    with pytest.raises(NonFiniteError, match=r"2\.weight, shape \(4, 4\) float32: 0 NaN and 1 inf of 16") as caught:
        check_finite_weights(model)
    assert "3.bias" in str(caught.value)
    assert "0.weight" not in str(caught.value)
    for index in (1, 4, 5):
        model[index].weight.data.fill_(torch.nan)
    assert_raises(NonFiniteError, "and 2 more parameters", check_finite_weights, model)
    check_finite_weights(torch.nn.Linear(4, 4, device="meta"))


def test_a_base_model_is_not_frozen_with_an_infinity() -> None:
    layer = linear("blockwise")
    layer.weight.requires_grad_(False)
    layer.weight[0, 0] = torch.inf
    assert_raises(NonFiniteError, "parameter weight", nn.keep_codes_only, layer)
    assert layer.weight is not None
