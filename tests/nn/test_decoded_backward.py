"""Recipes whose backward a GPU would decode are refused there, as early as the device is known; CPUs run them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from octavo import nn
from octavo.errors import BackendError
from octavo.models import ModelConfig, load_model
from octavo.nn import conversion
from octavo.nn.functional.linear import check_backward
from octavo.numerics import RECIPE_NAMES, Recipe, get_recipe
from octavo.ops._runtime.recipe_support import require_recipe
from octavo.ops.gemm.scaled_mm import library
from tests.assertions import assert_raises

CUDA = torch.device("cuda")
HYBRID = get_recipe("blockwise", fp8_format="hybrid")
REFUSAL = r"'blockwise' with fp8_format='hybrid' .* use fp8_format='e4m3' or backward='bf16', or recipe 'rowwise'"
SIZE = torch.Size((256, 256))


def all_recipes() -> list[Recipe]:
    """Every recipe in every format and with either backward, where it has such fields."""
    made = []
    for name in RECIPE_NAMES[1:]:
        formats = [{}] if name == "nvfp4" else [{"fp8_format": "e4m3"}, {"fp8_format": "hybrid"}]
        made += [get_recipe(name, **form, backward=backward) for form in formats for backward in ("fp8", "bf16")]
    wgrad = {"input_for_grad_weight": "block_1x128"}
    kept = {"high_precision_gemms": ("grad_input", "grad_weight")}
    more = ({"fake_quant": True}, kept, {"high_precision_gemms": ("grad_input",)}, wgrad, {"scale_format": "e8m0"})
    return made + [get_recipe("blockwise", fp8_format=form, **each) for form in ("hybrid", "e4m3") for each in more]


def is_decoded(recipe: Recipe) -> bool:
    """Whether the library's layout has any FP8 product of a training step decoded."""
    grad, pairs = recipe.grad_output, {"output": (recipe.input, recipe.weight)}
    pairs |= {"grad_input": (grad, recipe.weight), "grad_weight": (grad, recipe.wgrad_input)}
    return any(
        library.layout_of(SIZE, a, SIZE, b).is_decoded  # type: ignore[arg-type]
        for gemm, (a, b) in pairs.items()
        if recipe.in_fp8(gemm)
    )


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda r: f"{r.name}-{r.fp8_format.name}-{r.has_fp8_backward}")
def test_what_the_library_decodes_is_refused(recipe: Recipe) -> None:
    """Over all recipes: no product that a report calls FP8 is decoded on a GPU."""
    assert recipe.decodes_backward == is_decoded(recipe)
    if recipe.decodes_backward:
        assert_raises(BackendError, REFUSAL, require_recipe, recipe, CUDA)
    require_recipe(recipe, torch.device("cpu"))


def test_only_blockwise_in_hybrid_is_decoded() -> None:
    found = {(r.name, r.fp8_format.name) for r in all_recipes() if r.decodes_backward}
    assert found == {("blockwise", "HYBRID")}


def test_convert_refuses_before_it_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_device_of", lambda model: CUDA)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    assert_raises(BackendError, REFUSAL, nn.convert, model, HYBRID)
    assert_raises(BackendError, REFUSAL, nn.convert, model, "bf16", overrides={"0": HYBRID})
    assert type(model[0]) is torch.nn.Linear


def test_load_model_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.load.check_device", lambda device: None)
    assert_raises(BackendError, REFUSAL, load_model, "no-such-folder", device="cuda", recipe=HYBRID)
    assert_raises(BackendError, REFUSAL, load_model, object.__new__(ModelConfig), device="cuda", recipe=HYBRID)


@pytest.mark.parametrize("what", ["linear", "torch's linear", "norm and linear", "norm and mlp", "experts"])
def test_a_training_forward_under_autocast_refuses(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the device is known no earlier; without gradients nothing is decoded, and nothing refused."""
    sizes = {"dtype": torch.bfloat16}
    layer, extra = {
        "linear": (nn.Linear(128, 128), ()),
        "torch's linear": (torch.nn.Linear(128, 128).bfloat16(), ()),
        "norm and linear": (nn.LayerNormLinear(128, 128), ()),
        "norm and mlp": (nn.LayerNormMLP(128, 256), ()),
        "experts": (nn.GroupedLinear(128, 128, 2, **sizes), (torch.tensor([2, 4], dtype=torch.int32),)),
    }[what]
    x = torch.ones(4, 128, dtype=torch.bfloat16)
    with torch.no_grad(), nn.autocast(recipe=HYBRID):
        layer(x, *extra)
    with monkeypatch.context() as patched, nn.autocast(recipe=HYBRID):
        patched.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        assert_raises(BackendError, REFUSAL, layer, x, *extra)


def test_a_cpu_trains_so() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    nn.convert(model, HYBRID)
    model(torch.ones(4, 128)).sum().backward()
    assert model[0].weight.grad is not None
    check_backward(HYBRID, torch.ones(1))
    check_backward(dataclasses.replace(HYBRID, grad_output=None), SimpleNamespace(is_cuda=True))  # type: ignore[arg-type]
