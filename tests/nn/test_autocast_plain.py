"""octavo.autocast over torch's own linears: what it reaches, what it leaves, and torch.compile."""

import pytest
import torch
from torch import nn

import octavo
from octavo.nn.plain_linears import warn_that_it_stays
from octavo.testing import assert_bitwise, assert_sqnr


def build(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128)).to(device)


def run(model, x):
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_equals_conversion(recipe, generator, device):
    model, x = build(device), torch.randn(50, 256, generator=generator).to(device)
    plain = run(model, x)
    with octavo.autocast(recipe=recipe):
        found = run(model, x)
    octavo.convert(model, recipe)
    for got, want, high in zip(found, run(model, x), plain, strict=True):
        assert_bitwise(got, want)
        assert_sqnr(got, high, 18.0)
        assert not torch.equal(got, high)


@pytest.mark.parametrize("kind", ["torch", "octavo"])
def test_contexts_nest_and_modules_can_be_skipped(kind, generator):
    model, x = build(), torch.randn(8, 256, generator=generator)
    if kind == "octavo":  # a linear without a recipe
        model = octavo.nn.Linear(256, 128, dtype=torch.float32)
    plain = model(x)
    with octavo.autocast(recipe="rowwise"):
        quantized = model(x)
        with octavo.autocast(enabled=False):
            assert_bitwise(model(x), plain)
        with octavo.autocast(recipe="blockwise"):
            assert not torch.equal(model(x), quantized)
        if kind == "torch":
            with octavo.autocast(recipe="rowwise", ignore=[model]):
                assert_bitwise(model(x), plain)
        assert_bitwise(model(x), quantized)
    assert_bitwise(model(x), plain)
    assert not torch.equal(quantized, plain)


def test_torch_autocast_sets_the_dtype(generator):
    model, x = build(), torch.randn(8, 256, generator=generator)
    with torch.autocast("cpu", torch.bfloat16), octavo.autocast(recipe="blockwise"):
        assert model(x).dtype == torch.bfloat16


@pytest.mark.parametrize("inside", [True, False])
def test_compiles_without_a_break(inside, generator):
    model, x = build(), torch.randn(8, 256, generator=generator)

    def forward(x):
        with octavo.autocast(recipe="blockwise"):
            return model(x)

    torch._dynamo.reset()
    if inside:
        assert_bitwise(torch.compile(forward, fullgraph=True, backend="aot_eager")(x), forward(x))
        return
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with octavo.autocast(recipe="blockwise"):
        assert_bitwise(compiled(x), forward(x))
    assert_bitwise(compiled(x), model(x))


def test_foreign_frameworks_models(generator):
    transformers = pytest.importorskip("transformers", reason="an optional dependency")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 128, (2, 16), generator=generator)
    plain = model(ids).logits
    with octavo.autocast(recipe="rowwise", ignore=[model.lm_head]):
        found = model(ids, labels=ids)
    assert_sqnr(found.logits, plain, 15.0)
    assert not torch.equal(found.logits, plain)
    found.loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_octavos_high_precision_linears_stay_so(generator):
    linear = octavo.nn.Linear(256, 128, bias=True)
    linear.recipe = octavo.get_recipe("bf16")
    x = torch.randn(8, 256, generator=generator).bfloat16()
    plain = linear(x)
    with octavo.autocast(recipe="rowwise"):
        assert_bitwise(linear(x), plain)


def test_writes_are_seen_and_those_into_data_after_marking(generator):
    model, x = build(), torch.randn(8, 256, generator=generator)
    with octavo.autocast(recipe="blockwise"):
        first = model(x)
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        before = model(x)
        assert not torch.equal(before, first)
        model[0].weight.data.mul_(2.0)
        octavo.nn.mark_weights_updated(model)
        after = model(x)
        assert not torch.equal(after, before)
        model[0].weight.data = model[0].weight.data * 2.0  # other storage
        assert not torch.equal(model(x), after)


def test_double_precision_stays(generator):
    model, x = build().double(), torch.randn(8, 256, generator=generator).double()
    warn_that_it_stays.cache_clear()
    with octavo.autocast(recipe="blockwise"):
        with pytest.warns(UserWarning, match="float64 .* brings FP8 to bfloat16, float16 and float32") as said:
            found = model(x)
        assert len(said) == 1
        assert_bitwise(model(x), found)  # and nothing is said again
    assert_bitwise(found, model(x))


def test_double_precision_compiles_without_a_break(generator):
    model, x = build().double(), torch.randn(8, 256, generator=generator).double()
    torch._dynamo.reset()
    warn_that_it_stays.cache_clear()
    with octavo.autocast(recipe="blockwise"), pytest.warns(UserWarning, match="stays in float64"):
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert_bitwise(found, model(x))


def test_conversion_keeps_hooks_and_torchs_autocast(generator):
    model, x, calls = build(), torch.randn(8, 256, generator=generator), []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    octavo.convert(model, "blockwise")
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x.requires_grad_())
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert calls == ["forward", "backward"]
