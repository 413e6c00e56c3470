"""Recipe overrides of single modules: what a name means, which override decides, what the report says."""

import pytest
import torch

from octavo import nn
from octavo.errors import BackendError, RecipeError
from octavo.nn.overrides import match_rank, resolve, select
from octavo.numerics import RECIPE_NAMES, get_recipe
from octavo.numerics.recipe import EMULATED_RECIPES
from octavo.ops._runtime import recipe_support
from octavo.ops._runtime.recipe_support import require_recipe, support_by_capability
from octavo.testing import assert_bitwise
from tests.assertions import assert_raises

BLOCK_RECIPES = ("blockwise",)  # whose GEMMs are Hopper's alone
NAMES = [f"layers.{i}.{block}" for i in (0, 1, 10) for block in ("attn.qkv_proj", "mlp.up_proj", "mlp.down_proj")]


def stack():
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for _ in range(2):
        block = torch.nn.Module()
        block.mlp = torch.nn.Sequential()
        block.mlp.add_module("up_proj", torch.nn.Linear(32, 64))
        block.mlp.add_module("down_proj", torch.nn.Linear(64, 32))
        model.layers.append(block)
    model.lm_head = torch.nn.Linear(32, 8)
    return model


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("layers.0.mlp.up_proj", 1), ("layers.1", 3), ("layers", 9), ("mlp", 6), ("down_proj", 3), ("10", 3)],
)
def test_a_name_is_full_prefix_or_part(pattern, count):
    assert len(select([pattern], NAMES, "layers")) == count


@pytest.mark.parametrize("pattern", ["layer", "layers.1.mlp.up", "mlp.up_proj", "proj", "0.mlp", "layers.", ""])
def test_a_name_is_never_a_substring(pattern):
    assert all(match_rank(pattern, name) is None for name in NAMES)
    assert_raises(RecipeError, "names no linear", select, [pattern], NAMES, "layers")


def test_unknown_name_suggests_the_nearest():
    assert_raises(RecipeError, "did you mean 'down_proj'", resolve, {"down_prj": 1}, NAMES, "overrides")


def test_the_most_specific_decides_whatever_the_order():
    overrides = {"layers.0.mlp.up_proj": "full", "layers.0.mlp": "longer", "layers.0": "prefix", "down_proj": "last"}
    overrides |= {"mlp": "part", "layers": "first part"}
    for order in (overrides, dict(reversed(overrides.items()))):
        chosen = {name: value for name, (_, value) in resolve(order, NAMES, "overrides").items()}
        assert chosen["layers.0.mlp.up_proj"] == "full"
        assert chosen["layers.0.mlp.down_proj"] == "longer"
        assert chosen["layers.0.attn.qkv_proj"] == "prefix"
        assert chosen["layers.1.mlp.down_proj"] == "last"
        assert chosen["layers.1.mlp.up_proj"] == "part"
        assert chosen["layers.1.attn.qkv_proj"] == "first part"


def test_convert_with_overrides_reports_each():
    model = stack()
    report = nn.convert(model, "blockwise", overrides={"layers.0.mlp": "bf16", "down_proj": get_recipe("rowwise")})
    assert [(row.name, row.recipe, row.reason) for row in report.rows] == [
        ("layers.0.mlp.up_proj", None, "override 'layers.0.mlp'"),
        ("layers.0.mlp.down_proj", None, "override 'layers.0.mlp'"),
        ("layers.1.mlp.up_proj", "blockwise", "replaced torch.nn.Linear"),
        ("layers.1.mlp.down_proj", "rowwise", "replaced torch.nn.Linear, override 'down_proj'"),
        ("lm_head", None, "left out by ignore: rounding logits shows in every probability"),
    ]
    assert type(model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert model.layers[1].mlp.down_proj.recipe == get_recipe("rowwise")


def test_an_override_computes_what_its_recipe_computes():
    x = torch.randn(4, 64)
    mixed, whole = stack(), stack()
    nn.convert(mixed, "tensorwise", overrides={"down_proj": "rowwise"})
    nn.convert(whole, "rowwise")
    assert_bitwise(mixed.layers[1].mlp.down_proj(x).detach(), whole.layers[1].mlp.down_proj(x).detach())


def test_an_fp8_override_on_a_bf16_model():
    model = stack()
    report = nn.convert(model, "bf16", overrides={"layers.1.mlp.up_proj": "blockwise"})
    assert report.fp8_names == ("layers.1.mlp.up_proj",)
    assert type(model.layers[1].mlp.down_proj) is torch.nn.Linear


def test_overrides_that_can_do_nothing_are_errors():
    model = stack()
    with pytest.raises(RecipeError, match="overrides names no linear"):
        nn.convert(model, "blockwise", overrides={"gate_proj": "bf16"})
    with pytest.raises(RecipeError, match="override 'lm_head' changes nothing: ignore leaves out lm_head"):
        nn.convert(model, "blockwise", overrides={"lm_head": "rowwise"})
    assert_raises(RecipeError, "did you mean 'rowwise'", nn.convert, model, "blockwise", overrides={"mlp": "rowise"})
    assert all(type(m) is not nn.Linear for m in model.modules()), "nothing was changed"


def test_exact_looks_at_overrides_too():
    layer = torch.nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(RecipeError, match="'tensorwise' shares a scale"):
        nn.convert(layer, "blockwise", exact=True, overrides={"0": "tensorwise"})


def test_one_linear_in_two_places_has_one_recipe():
    model = torch.nn.Module()
    model.a = model.b = torch.nn.Linear(8, 8)
    assert_raises(RecipeError, "a and b are one linear", nn.convert, model, "rowwise", overrides={"a": "blockwise"})
    assert nn.convert(model, "rowwise", overrides={"a": "blockwise", "b": "blockwise"}).fp8_names == ("a", "b")


@pytest.mark.parametrize(
    ("capability", "cuda", "emulated", "lacks"),
    [
        ((9, 0), (12, 9), EMULATED_RECIPES, ()),
        ((9, 0), (12, 8), EMULATED_RECIPES, BLOCK_RECIPES),
        ((8, 9), (13, 0), EMULATED_RECIPES, BLOCK_RECIPES),
        ((10, 0), (13, 0), EMULATED_RECIPES, BLOCK_RECIPES),
        ((8, 0), (13, 0), (), RECIPE_NAMES[1:]),
        (None, (), RECIPE_NAMES[1:], ()),
    ],
)
def test_what_a_device_has(capability, cuda, emulated, lacks):
    known = support_by_capability(capability, cuda)
    assert tuple(s.recipe for s in known if s.how == "emulated") == emulated
    assert tuple(s.recipe for s in known if s.how == "none") == lacks
    assert tuple(s.recipe for s in known) == RECIPE_NAMES
    assert all(s.reason for s in known)


def test_a_recipe_that_the_gpu_lacks_is_refused(monkeypatch):
    ada = support_by_capability((8, 9), (13, 0))
    monkeypatch.setattr(recipe_support, "recipe_support", lambda device: ada)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    with pytest.raises(BackendError, match=r"NVIDIA L4 does not have recipe 'blockwise'.*it has bf16, delayed, tensor"):
        require_recipe(get_recipe("blockwise"), torch.device("cuda"))
    require_recipe(get_recipe("rowwise"), torch.device("cuda"))
    require_recipe(get_recipe("blockwise", fake_quant=True), torch.device("cuda"))
