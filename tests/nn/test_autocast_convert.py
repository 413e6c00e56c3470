"""autocast and convert: who decides a linear's recipe, what is replaced, and what the report says."""

import pytest
import torch
from torch.nn.utils import prune

from octavo import nn
from octavo.errors import ConfigError, RecipeError
from octavo.nn import plain_linears
from octavo.nn.functional.linear import warn_of_fp16
from octavo.numerics import get_recipe
from octavo.numerics.analysis import sqnr
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_raises


def plain_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("embed", torch.nn.Embedding(10, 64))
    model.add_module("up", torch.nn.Linear(64, 128))
    model.add_module("inner", torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False)))
    model.add_module("lm_head", torch.nn.Linear(64, 10))
    return model


def linear():
    torch.manual_seed(0)
    return nn.Linear(128, 64, dtype=torch.float32)


def test_a_model_with_adapters_is_refused_and_left_alone():
    adapted = type("Linear", (torch.nn.Module,), {"__module__": "peft.tuners.lora.layer"})
    model = plain_model()
    wrapper = adapted()
    wrapper.base_layer, wrapper.lora_A = model.up, torch.nn.Linear(64, 4)
    model.up = wrapper
    assert_raises(ConfigError, "up has PEFT's adapters already; convert the base first", nn.convert, model, "blockwise")
    assert type(model.lm_head) is type(model.inner[0]) is torch.nn.Linear


def test_own_recipe_wins_but_for_enabled_false():
    layer, x = linear(), torch.randn(4, 128)
    plain = layer(x).detach()
    nn.convert(layer, "blockwise")
    own = layer(x).detach()
    with nn.autocast(recipe="rowwise"):
        assert_bitwise(layer(x).detach(), own)
    with nn.autocast(enabled=False):
        assert_bitwise(layer(x).detach(), plain)


def test_autocast_leaves_nothing_behind_after_an_error():
    layer, x = linear(), torch.randn(4, 128)
    plain = layer(x).detach()
    with pytest.raises(ZeroDivisionError), nn.autocast():
        raise ZeroDivisionError
    assert_bitwise(layer(x).detach(), plain)


def test_autocast_refuses_what_it_does_not_know():
    def enter(*args, **options):
        with nn.autocast(*args, **options):
            pass

    assert_raises(RecipeError, "did you mean 'blockwise'", enter, recipe="blockwize")
    assert_raises(RecipeError, r"recipe=\.\.\.", enter, "rowwise")
    for wrong in (["lm_head"], torch.nn.Linear(2, 2)):  # convert's names, and one module
        assert_raises(RecipeError, "takes a list of modules, got", enter, ignore=wrong)


def test_convert_replaces_plain_linears_and_reports():
    model = plain_model()
    weight = model.up.weight
    report = nn.convert(model, "blockwise")
    assert [(r.name, r.recipe) for r in report.rows] == [
        ("up", "blockwise"),
        ("inner.0", "blockwise"),
        ("lm_head", None),
    ]
    assert model.up.weight is weight
    assert type(model.lm_head) is torch.nn.Linear
    assert report.fp8_names == ("up", "inner.0")
    assert report.fp8_flop_share == 1.0
    assert "2 of 3 linears in FP8, 100.0% of linear FLOPs" in str(report)
    assert "left out by ignore" in str(report)
    model(torch.arange(10)).sum().backward()
    assert model.up.weight.grad is not None


def test_a_path_is_no_model():
    with pytest.raises(ConfigError, match=r"convert takes a model, got 'hf-llama'; octavo\.load_model\(path\) makes"):
        nn.convert("hf-llama", "blockwise")


def test_ignore_is_by_name_never_by_substring():
    report = nn.convert(plain_model(), "rowwise", ignore=("up",))
    assert report.fp8_names == ("inner.0", "lm_head") and report.fp8_flop_share == pytest.approx(0.5)
    for ignore, said in {
        ("u",): r"ignore names no linear of this model: 'u'; .*; did you mean 'up'\?",
        ("foo",): r"'foo'; .*; the nearest names are '[\w.]+', '[\w.]+', '[\w.]+'$",
        "lm_head": r"got the string 'lm_head'; write ignore=\['lm_head'\]",
        ("inne",): r"'inne'; .*did you mean 'inner\.0'",
    }.items():
        assert_raises(RecipeError, said, nn.convert, plain_model(), "rowwise", ignore=ignore)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))  # a name that is not there is never the nearest
    assert_raises(RecipeError, r"'head'; .*; the nearest names are '0'", nn.convert, model, "rowwise", ignore=["head"])


def test_ignore_takes_the_name_of_a_module_above():
    assert nn.convert(plain_model(), "rowwise", ignore=("inner",)).fp8_names == ("up", "lm_head")


@pytest.mark.parametrize(
    "wrong", [lambda module, name: True, None, [torch.nn.Linear(2, 2)]], ids=["filter", "none", "module"]
)
def test_what_is_no_list_of_names_is_refused_with_what_to_write(wrong):
    said = r"ignore takes a list .*write ignore=\[name for name, module in model.named_m"
    assert_raises(RecipeError, said, nn.convert, plain_model(), "rowwise", ignore=wrong)


@pytest.mark.parametrize("wrap", [prune.identity, torch.nn.utils.spectral_norm], ids=["prune", "spectral_norm"])
def test_a_weight_that_a_hook_computes_stays_as_it_is(wrap):
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 64))
    wrap(model[1], "weight")
    with pytest.warns(
        UserWarning, match="left 33.3% of a token's FLOPs in high precision: .*: 1 of Linear with a computed weight;"
    ):
        report = nn.convert(model, "rowwise")
    assert report.fp8_names == ("0",) and "no Parameter: a hook computes it" in str(report)
    model(torch.ones(4, 128)).sum().backward()
    assert model[1].weight_orig.grad.abs().sum() > 0


def test_convert_back_to_bf16():
    layer, x = linear(), torch.randn(4, 128)
    plain = layer(x).detach()
    nn.convert(layer, "blockwise")
    report = nn.convert(layer, "bf16")
    assert report.fp8_flop_share == 0.0
    assert "the recipe is high precision" in str(report)
    assert_bitwise(layer(x).detach(), plain)


def test_subclasses_are_left_alone_and_said():
    class Special(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = torch.nn.Sequential(Special(8, 8))
    with pytest.warns(UserWarning, match=r"left 100.0% of a token's FLOPs in high precision: .*: 1 of Special;"):
        report = nn.convert(model, "blockwise")
    assert type(model[0]) is Special
    assert "forward of its own" in report.rows[0].reason


def test_exact_needs_row_local_scales():
    assert_raises(RecipeError, "scales of one token each", nn.convert, linear(), "tensorwise", exact=True)
    layer = linear()
    nn.convert(layer, "rowwise", exact=True)
    assert layer.exact


def test_exact_is_for_octavos_own_modules():
    model = plain_model()
    assert_raises(RecipeError, "octavo's own linears", nn.convert, model, "rowwise", exact=True)
    assert type(model.up) is torch.nn.Linear


def test_a_linear_in_two_places_is_converted_in_both():
    model = torch.nn.Module()
    model.a = model.b = torch.nn.Linear(8, 8)
    report = nn.convert(model, "rowwise")
    assert model.a is model.b
    assert isinstance(model.b, nn.Linear)
    assert report.fp8_names == ("a", "b")


def test_an_exact_layer_refuses_another_recipe():
    layer = linear()
    nn.convert(layer, "rowwise", exact=True)
    x = torch.randn(4, 128)
    with nn.autocast(recipe="rowwise"):
        layer(x)
    nn.convert(layer, "bf16", exact=True)
    layer.recipe = None
    with nn.autocast(recipe="tensorwise"), pytest.raises(RecipeError, match="trainer and sampler would differ"):
        layer(x)


def test_a_model_of_which_nothing_is_converted_is_said_aloud() -> None:
    with pytest.warns(UserWarning, match="left every layer in high precision: .* and found none$"):
        report = nn.convert(torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.LayerNorm(8)), "rowwise")
    assert not report.rows


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torchs_encoder_layer_calls_its_linears_without_gradients_too(activation):
    """There torch has a path of its own, which reads the weights."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, activation=activation, batch_first=True).eval()
    x = torch.randn(2, 6, 128)
    with torch.no_grad():
        plain = layer(x)
    report = nn.convert(layer, "blockwise", ignore=("self_attn", "out_proj"))
    assert report.fp8_names == ("linear1", "linear2")
    with_gradients = layer(x).detach()
    with torch.no_grad():
        assert_sqnr(layer(x), with_gradients, 90.0)  # torch's attention sums in another order there
    assert sqnr(plain, with_gradients) < 60.0


def test_a_report_of_short_names_lines_up_with_its_headings():
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)).bfloat16()
    heading, *rows, summary = str(nn.convert(model, "rowwise")).splitlines()
    assert summary.endswith("100.0% of linear FLOPs")  # and nothing of an lm_head, which there is not
    assert len(rows) == 2 and {row.index("rowwise") for row in rows} == {heading.index("recipe")}


def test_torchs_attention_is_in_the_report_and_said_under_autocast():
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    with pytest.warns(UserWarning, match="left 50.0% of .* 1 of NonDynamicallyQuantizableLinear, 1 of MultiheadAtt"):
        report = nn.convert(layer, "blockwise")
    assert "forward of its own" not in report.rows[0].reason  # torch's attention reads the weight and calls nothing
    assert "NonDynamicallyQuantizableLinear is a subclass of Linear, whose owner may read" in report.rows[0].reason
    (row,) = (row for row in report.rows if row.name == "self_attn.in_proj_weight")
    assert row.recipe is None and (row.in_features, row.out_features) == (128, 384)
    linears = 2 * 128 * 256
    assert report.fp8_flop_share == linears / (linears + 128 * 128 + 3 * 128 * 128)
    attention, x = torch.nn.MultiheadAttention(128, 4, batch_first=True), torch.randn(2, 6, 128)
    plain_linears.warn_that_it_stays.cache_clear()
    with nn.autocast(recipe="blockwise"), pytest.warns(UserWarning, match="MultiheadAttention stays in high precision"):
        attention(x, x, x)


@pytest.mark.parametrize("path", ["convert", "autocast"])
def test_fp16_gradients_that_fp8_hides_are_said(path):
    """A cast saturates, as TransformerEngine's do: an infinite gradient comes out finite."""
    model, x = torch.nn.Linear(128, 128).half(), torch.ones(4, 128, dtype=torch.float16)
    warn_of_fp16.cache_clear()
    if path == "convert":
        model = torch.nn.Sequential(model)
        nn.convert(model, "blockwise")
    with nn.autocast(recipe="blockwise"), pytest.warns(UserWarning, match="GradScaler cannot see"):
        out = model(x)
    out.backward(torch.full_like(out, float("inf")))
    assert all(parameter.grad.isfinite().all() for name, parameter in model.named_parameters() if "weight" in name)


def test_the_default_is_autocasts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    nn.convert(model)
    assert model[0].recipe == get_recipe("blockwise")
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    own = model(x)
    with nn.autocast():
        assert_bitwise(torch.nn.functional.linear(x, model[0].weight, model[0].bias), own)
