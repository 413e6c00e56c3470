"""LayerNormLinear, LayerNormMLP and TransformerLayer: fused equals unfused, what is saved, every way to be trained."""

import pytest
import torch

import octavo
from octavo import nn
from octavo.errors import ShapeError
from octavo.nn import fusion
from octavo.nn.weights import cached
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_all_bitwise, assert_all_sqnr, assert_raises
from tests.recipes import FP8_RECIPES as RECIPES

MODULES = {
    "linear rms": lambda **k: nn.LayerNormLinear(256, 384, normalization="RMSNorm", bias=False, parts=(256, 128), **k),
    "linear layer": lambda **k: nn.LayerNormLinear(256, 384, normalization="LayerNorm", **k),
    "mlp swiglu": lambda **k: nn.LayerNormMLP(256, 384, normalization="RMSNorm", activation="swiglu", bias=False, **k),
    "mlp gelu": lambda **k: nn.LayerNormMLP(256, 384, normalization="LayerNorm", activation="gelu", **k),
}
ALL_MODULES = pytest.mark.parametrize("name", MODULES)
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES)


def build(name, recipe, device="cpu", dtype=torch.bfloat16, **overrides):
    torch.manual_seed(0)
    module = MODULES[name](dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    module.to(device)
    octavo.convert(module, octavo.get_recipe(recipe, **overrides))
    return module


def inputs(generator, device="cpu", tokens=80, width=256):
    x, residual = (torch.randn(tokens, width, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), residual.requires_grad_()


def step(module, x, residual):
    """Forward and backward; (output, stream, gradients of inputs and parameters)."""
    module.zero_grad()
    x.grad = residual.grad = None
    out, stream = module.forward_residual(x, residual)
    (out.float().square().mean() + 0.1 * stream.float().square().mean()).backward()
    return out.detach(), stream.detach(), [x.grad, residual.grad, *(p.grad for p in module.parameters())]


@ALL_MODULES
@ALL_RECIPES
def test_fused_equals_unfused(name, recipe, generator, device):
    fused, unfused = build(name, recipe, device), build(name, recipe, device)
    nn.set_fusion(unfused, False)
    for number in range(2):
        x, residual = inputs(generator, device)
        found = step(fused, x, residual)
        x2, residual2 = (y.detach().requires_grad_() for y in (x, residual))
        wanted = step(unfused, x2, residual2)
        assert_bitwise(found[0], wanted[0], "output")
        assert_bitwise(found[1], wanted[1], "stream")
        if recipe == "delayed" and number == 0:
            continue  # its first scales are 1, under which most of a gradient underflows
        assert_all_sqnr(found[2], wanted[2], 22.0)  # inputs of norm and activation come back from FP8


@ALL_MODULES
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_bf16_saved_activations_lose_nothing(name, recipe, generator, device):
    fused, unfused = (build(name, recipe, device, saved_activations="bf16") for _ in range(2))
    nn.set_fusion(unfused, False)
    x, residual = inputs(generator, device)
    found = step(fused, x, residual)
    wanted = step(unfused, *(y.detach().requires_grad_() for y in (x, residual)))
    assert_all_sqnr(found[2], wanted[2], 40.0)  # the same codes; norm and sums round at other places


@ALL_MODULES
def test_saved_for_backward_is_fp8(name, generator):
    module = build(name, "blockwise")
    x, residual = inputs(generator)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module.forward_residual(x, residual)
    parameters = {id(p) for p in module.parameters()}
    large = [t for t in saved if id(t) not in parameters and t.numel() >= x.numel() // 2]
    assert large and {t.dtype for t in large} == {torch.float8_e4m3fn}


@ALL_MODULES
@ALL_RECIPES
def test_checkpointing_replays_the_same_codes(name, recipe, generator):
    plain, replayed = build(name, recipe), build(name, recipe)
    for _ in range(3):
        x, residual = inputs(generator)
        _, _, wanted = step(plain, x, residual)
        a, b = (y.detach().requires_grad_() for y in (x, residual))
        replayed.zero_grad()
        out, stream = nn.checkpoint(replayed.forward_residual, a, b)
        (out.float().square().mean() + 0.1 * stream.float().square().mean()).backward()
        assert_all_bitwise([a.grad, b.grad, *(p.grad for p in replayed.parameters())], wanted)
    for (key, got), want in zip(replayed.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_bitwise(got, want, key)  # delayed scaling's history rolled as often


def test_checkpointing_keeps_the_autocast_of_the_forward(generator):
    torch.manual_seed(0)
    module = nn.LayerNormLinear(256, 128)
    x, _ = inputs(generator)
    with octavo.autocast(recipe="rowwise"):
        module(x).float().square().mean().backward()
        wanted, x.grad, module.linear.weight.grad = module.linear.weight.grad, None, None
        out = nn.checkpoint(module, x)
    out.float().square().mean().backward()  # outside of the context
    assert_bitwise(module.linear.weight.grad, wanted)


@ALL_MODULES
def test_zero_tokens_and_odd_counts(name, generator, device):
    module = build(name, "blockwise", device)
    for tokens in (0, 1, 17, 131):
        x, residual = inputs(generator, device, tokens)
        out, stream, grads = step(module, x, residual) if tokens else (*module.forward_residual(x, residual), [])
        assert out.shape[0] == stream.shape[0] == tokens
        assert all(torch.isfinite(g).all() for g in grads)


def test_weights_are_quantized_once_a_version(generator, monkeypatch):
    calls = []
    original = cached.quantize_forward
    monkeypatch.setattr(cached, "quantize_forward", lambda *a: calls.append(1) or original(*a))
    module = build("mlp swiglu", "blockwise")
    for _ in range(3):  # micro-batches
        step(module, *inputs(generator))
    assert len(calls) == 2
    nn.mark_weights_updated(module)
    step(module, *inputs(generator))
    assert len(calls) == 4


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
@pytest.mark.parametrize("bias", [False, True])
def test_transformer_layer(recipe, bias, generator, device):
    torch.manual_seed(0)
    kinds = {"activation": "gelu", "normalization": "LayerNorm"} if bias else {}
    layer = nn.TransformerLayer(256, 384, 4, 2, bias=bias, **kinds).to(device)
    x = torch.randn(2, 64, 256, generator=generator).to(device, torch.bfloat16)
    plain = layer(x).detach()
    packed = layer(x.reshape(128, 256), cu_seqlens=torch.tensor([0, 64, 128], device=device)).detach()
    assert_sqnr(packed.view_as(plain), plain, 40.0)
    octavo.convert(layer, recipe)
    for _ in range(2):
        layer.zero_grad()
        out = layer(x)
        out.float().square().mean().backward()
    assert_sqnr(out, plain, 25.0)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_bad_input_is_refused():
    layer = nn.TransformerLayer(64, 128, 4)
    assert_raises(ShapeError, "cu_seqlens", layer, torch.zeros(8, 64, dtype=torch.bfloat16))
    assert_raises(ShapeError, "in_features=64", nn.LayerNormLinear(64, 32), torch.zeros(2, 32, dtype=torch.bfloat16))
    assert_raises(ShapeError, "swiglu", nn.LayerNormMLP, 64, 128, activation="relu")
    assert_raises(ShapeError, "multiple", nn.TransformerLayer, 64, 128, 4, 3)


FROZEN = {"weights": ("linear", "fc1", "fc2"), "second weight": ("fc2", "linear"), "norm": ("norm",), "all": ("",)}


@ALL_MODULES
@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("saved", ["fp8", "bf16"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(name, what, saved, generator, device):
    whole, partly = (build(name, "blockwise", device, saved_activations=saved) for _ in range(2))
    for parameter_name, parameter in partly.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(FROZEN[what]))
    x, residual = inputs(generator, device)
    *_, wanted = step(whole, x, residual)
    *_, found = step(partly, *(y.detach().requires_grad_() for y in (x, residual)))
    for got, want, parameter in zip(found, wanted, [None, None, *partly.parameters()], strict=True):
        if parameter is None or parameter.requires_grad:
            assert_bitwise(got, want)
        else:
            assert got is None


@ALL_MODULES
def test_the_stream_alone_may_be_used(name, generator):
    module = build(name, "blockwise")
    for residual in (None, inputs(generator)[1]):
        x, _ = inputs(generator)
        _, stream = module.forward_residual(x, residual)
        stream.float().sum().backward()
        assert_bitwise(x.grad, torch.ones_like(x))
        assert all(p.grad is None for p in module.parameters())


@ALL_MODULES
def test_an_input_without_gradient(name, generator):
    module = build(name, "blockwise")
    x = inputs(generator)[0].detach()
    module(x).float().square().mean().backward()
    assert all(p.grad is not None for p in module.parameters())


@ALL_MODULES
def test_a_linear_with_a_forward_of_its_own_is_called(name, generator):
    class Shifted(nn.Linear):
        def forward(self, x, **options):
            return super().forward(x, **options) + 100.0

    module, x = build(name, "rowwise"), inputs(generator)[0].detach()
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    plain = module(x)
    linears[-1].__class__ = Shifted
    fusion._has_warned.clear()
    with pytest.warns(UserWarning, match=r"has a forward of its own.*plan_fusion"):
        assert_bitwise(module(x), plain + 100.0)
    nn.plan_fusion(module)
    assert_bitwise(module(x), plain + 100.0)
    assert not module.fusion.is_fused


@ALL_MODULES
def test_backward_hooks_fire(name, generator):
    module, calls = build(name, "rowwise"), []
    for child in module.children():
        child.register_full_backward_hook(lambda *_: calls.append(1))
    nn.plan_fusion(module)
    module(inputs(generator)[0]).float().sum().backward()
    assert len(calls) == len(list(module.children()))
