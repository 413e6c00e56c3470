"""Linear under every recipe: SQNR of its three GEMMs, gradients against their definition, parts, weight versions."""

import contextlib
import copy
import pickle

import pytest
import torch

from octavo import nn
from octavo.errors import BackendError, CheckpointError, DtypeError, RecipeError, ShapeError
from octavo.numerics import get_recipe
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize, quantize_columns
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_raises
from tests.recipes import FP8_RECIPES

PARTS = [(384,), (256, 128), (200, 100, 84)]


def make(recipe, parts=(384,), bias=True, k=344, dtype=torch.float32, device="cpu", **overrides):
    torch.manual_seed(1)
    linear = nn.Linear(k, sum(parts), bias, parts=parts, dtype=dtype)
    torch.nn.init.normal_(linear.weight, std=0.02)
    if bias:
        torch.nn.init.normal_(linear.bias)
    linear.recipe = get_recipe(recipe, **overrides)
    return linear.to(device)


def step(linear, generator, tokens=77):
    """One forward and backward; returns (x, grad, output)."""
    device, dtype = linear.weight.device, linear.weight.dtype
    x = torch.randn(tokens, linear.in_features, generator=generator).to(device, dtype).requires_grad_()
    grad = torch.randn(tokens, linear.out_features, generator=generator).to(device, dtype)
    linear.zero_grad()
    out = linear(x)
    out.backward(grad)
    return x, grad, out.detach()


def assert_gemms(linear, x, grad, out, *, output_db, grad_db):
    weight, x64, grad64 = linear.weight.detach().double(), x.detach().double(), grad.double()
    assert_sqnr(out, x64 @ weight.t() + linear.bias.double(), output_db, "output")
    assert_sqnr(x.grad, grad64 @ weight, grad_db, "grad_input")
    assert_sqnr(linear.weight.grad, grad64.t() @ x64, grad_db, "grad_weight")
    assert_sqnr(linear.bias.grad, grad64.sum(0), 100.0, "grad_bias")


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("overrides", [{"fp8_format": "hybrid"}, {"fp8_format": "e4m3"}, {"backward": "bf16"}], ids=str)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_every_recipe(recipe, overrides, parts, generator, device):
    linear = make(recipe, parts, device=device, **overrides)
    if linear.recipe.decodes_backward and device.type == "cuda":
        assert_raises(BackendError, "both operands of each backward GEMM would be decoded", step, linear, generator)
        return
    for _ in range(3):  # delayed scaling needs steps for its scales
        result = step(linear, generator)
    # E5M2 has two mantissa bits: 24.6 dB on normal data in theory, one scale a tensor costs a little more
    is_fine = recipe in ("rowwise", "blockwise") and overrides == {"fp8_format": "e4m3"}
    assert_gemms(linear, *result, output_db=27.0, grad_db=25.0 if is_fine else 23.5)


def test_backward_operands_are_made_of_the_source(generator):
    """grad_input and grad_weight equal the scaled GEMMs of operands quantized apart: along N, and along tokens."""
    linear = make("blockwise", bias=False)
    x, grad, _ = step(linear, generator)
    recipe = linear.recipe
    weight = quantize_columns(linear.weight.detach().bfloat16(), recipe.weight)
    expected = scaled_mm(quantize(grad, recipe.grad_output), weight, out_dtype=torch.float32)
    assert_bitwise(x.grad, expected)
    operands = quantize_columns(grad, recipe.grad_output), quantize_columns(x.detach(), recipe.wgrad_input)
    assert_bitwise(linear.weight.grad, scaled_mm(*operands, out_dtype=torch.float32))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("k", [128, 344])
def test_exact_rows_do_not_depend_on_the_batch(recipe, k, generator, device):
    linear = make(recipe, (200, 100, 84), k=k, dtype=torch.bfloat16, device=device)
    linear.exact = True
    x = torch.randn(64, k, generator=generator).to(device, torch.bfloat16)
    whole = linear(x).detach()
    for rows in ([0], [63], [5, 40], list(range(63, -1, -4))):
        assert_bitwise(linear(x[rows]).detach(), whole[rows])


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "tensorwise"])
def test_fused_parts_keep_their_own_codes(recipe):
    fused = make(recipe, (200, 100, 84), bias=False)
    codes = torch.cat([q.qdata.view(torch.uint8) for q in fused.quantized_weight()])
    alone = [quantize(w.detach().bfloat16(), fused.recipe.weight) for w in fused.weight.split((200, 100, 84))]
    assert_bitwise(codes, torch.cat([q.qdata.view(torch.uint8) for q in alone]))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_new_weight_is_quantized_both_ways_in_one_call(recipe, bias, generator, calls, device):
    """By the training forward, once a weight version; the bits are those of one call each."""
    apart, together = (make(recipe, bias=bias, device=device, dtype=torch.bfloat16) for _ in range(2))
    apart.source.prequantizes = False
    calls.clear()
    for _ in range(3):
        state = generator.get_state()
        x, _, out = step(together, generator)
        assert calls.take() == ["quantize_both"]
        step(together, generator)
        assert not calls.take()  # gradient accumulation
        generator.set_state(state)
        other_x, _, other_out = step(apart, generator)
        assert calls.take() == ["quantize", "quantize_columns"]
        step(apart, generator)
        for a, b in ((out, other_out), (x.grad, other_x.grad), (together.weight.grad, apart.weight.grad)):
            assert_bitwise(a, b)
        calls.take()
        for linear in (apart, together):
            nn.mark_weights_updated(linear)


def test_codes_for_the_backward_wait_for_it_where_they_would_add_to_the_peak(generator, calls):
    """More saved for grad_weight than grad_weight takes; no gradient that needs them; an input that others save."""
    linear = make("blockwise", dtype=torch.bfloat16)
    calls.clear()
    for tokens, expected in ((2 * 384, ["quantize_both"]), (2 * 384 + 1, ["quantize", "quantize_columns"])):
        step(linear, generator, tokens=tokens)
        assert calls.take() == expected
        nn.mark_weights_updated(linear)
    x = torch.randn(8, 344, generator=generator).bfloat16()
    linear(x).sum().backward()  # the input wants no gradient
    assert calls.take() == ["quantize"]
    nn.mark_weights_updated(linear)
    linear.weight.requires_grad_(False)
    linear(x.requires_grad_()).sum().backward()
    assert calls.take() == ["quantize", "quantize_columns"]
    linear.weight.requires_grad_(True)
    linear.saves_input = True
    nn.mark_weights_updated(linear)
    linear(x).sum().backward()
    assert calls.take() == ["quantize", "quantize_columns"]


def test_codes_made_in_vain_are_not_made_again(generator, calls):
    linear = make("blockwise", dtype=torch.bfloat16)
    calls.clear()
    linear(torch.randn(8, 344, generator=generator).bfloat16().requires_grad_())
    nn.mark_weights_updated(linear)
    step(linear, generator)
    assert calls.take() == ["quantize_both", "quantize", "quantize_columns"]


def test_codes_made_ahead_go_with_delayed_scalings_scale(generator):
    """Two forwards, then a backward: it takes the scale that the second forward made, whatever made codes before."""
    found = []
    for prequantizes in (True, False):
        linear = make("delayed", dtype=torch.bfloat16)
        linear.source.prequantizes = prequantizes
        own = torch.Generator().manual_seed(5)
        step(linear, own)
        nn.mark_weights_updated(linear)
        x = torch.randn(16, 344, generator=own).bfloat16().requires_grad_()
        (linear(x) + linear(x)).sum().backward()
        found.append(x.grad)
    assert_bitwise(*found)


def test_saved_for_backward_is_fp8(generator):
    linear = make("blockwise", bias=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(torch.randn(64, 344, generator=generator, requires_grad=True))
    saved = [t for t in saved if t is not linear.weight]  # for its version; it is no copy
    kinds = {t.dtype for t in saved}
    assert kinds == {torch.float8_e4m3fn, torch.float32}  # codes and their scales
    assert sum(t.numel() for t in saved if t.dtype == torch.float32) < 344 * 64 / 32


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_input_that_is_saved_anyway_gives_the_same_bits(recipe, device):
    results = []
    for saves_input in (False, True):
        linear = make(recipe, device=device, dtype=torch.bfloat16)
        linear.saves_input = saves_input
        generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            x, _, out = step(linear, generator)
        results.append((out, x.grad, linear.weight.grad))
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


def test_weight_is_quantized_once_a_version(generator):
    linear = make("blockwise")
    first = linear.quantized_weight()[0]
    step(linear, generator)
    assert linear.quantized_weight()[0] is first
    nn.mark_weights_updated(linear)
    assert linear.quantized_weight()[0] is not first
    again = linear.quantized_weight()[0]
    with torch.no_grad():
        linear.weight.mul_(2.0)  # a writer that did not count
    assert linear.quantized_weight()[0] is not again


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_every_optimizer_of_torch_is_noticed(options, generator, device):
    """Fused optimizers write without moving Tensor._version."""
    linear = make("blockwise", device=device)
    frozen = make("blockwise", device=device)
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, **options)
    kept = frozen.quantized_weight()[0]
    for _ in range(2):
        step(linear, generator)
        before = linear.quantized_weight()[0]
        optimizer.step()
        expected = quantize(linear.weight.detach().bfloat16(), linear.recipe.weight)
        assert_bitwise(linear.quantized_weight()[0].qdata, expected.qdata)
        assert linear.quantized_weight()[0] is not before
    assert frozen.quantized_weight()[0] is kept


def test_another_parameter_is_another_weight():
    linear = make("blockwise", bias=False)
    for scale in (1.0, 2.0, 3.0, 4.0):
        linear.weight = torch.nn.Parameter(torch.full_like(linear.weight, scale))
        assert float(linear.quantized_weight()[0].dequantize().max()) == pytest.approx(scale)


def test_copies_and_pickles_carry_no_codes(generator):
    linear = make("blockwise", bias=False)
    step(linear, generator)
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert other.source._forward is None
        assert_bitwise(other.quantized_weight()[0].qdata, linear.quantized_weight()[0].qdata)


def test_second_derivatives_are_refused(generator):
    linear = make("blockwise")
    x = torch.randn(4, 344, generator=generator, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    assert_raises(RuntimeError, "once_differentiable", grad.sum().backward)


def test_bias_gradient_keeps_its_precision(generator):
    linear = make("blockwise", bias=True)
    x, grad = torch.randn(300, 344, generator=generator).bfloat16(), torch.randn(300, 384, generator=generator)
    linear(x).backward(grad.bfloat16())
    assert_sqnr(linear.bias.grad, grad.bfloat16().double().sum(0), 100.0)


def test_loaded_codes_are_used_as_they_are(generator):
    source = make("blockwise", (200, 100, 84), bias=False)
    parts = [quantize(w.detach().bfloat16(), source.recipe.weight) for w in source.weight.split((200, 100, 84))]
    loaded = make("blockwise", (200, 100, 84), bias=False)
    loaded.load_quantized(parts)
    x = torch.randn(5, 344, generator=generator)
    assert loaded.weight is None
    assert_bitwise(loaded(x), source(x).detach())
    loaded.recipe = get_recipe("rowwise")
    assert_raises(RecipeError, "holds block_128x128 codes", loaded, x)
    loaded.recipe = None
    assert_raises(RecipeError, "FP8 codes only", loaded, x)
    assert_raises(CheckpointError, "do not fit parts", loaded.load_quantized, parts[:2])


def test_shapes_and_dtypes(generator, device):
    linear = make("blockwise", device=device)
    x = torch.randn(2, 3, 344, generator=generator).to(device)
    assert linear(x).shape == (2, 3, 384)
    assert linear(x[:0]).shape == (0, 3, 384)
    assert linear(x.bfloat16()).dtype == torch.bfloat16
    assert_raises(ShapeError, "in_features=344", linear, x[..., :300])
    assert_raises(DtypeError, "float64", linear, x.double())
    assert_raises(ShapeError, "must sum to out_features", nn.Linear, 8, 8, parts=(4, 2))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_zero_tokens_train(recipe, generator, device):
    linear = make(recipe, device=device)
    x, _, _ = step(linear, generator, tokens=0)
    assert x.grad.shape == (0, 344)
    assert (linear.weight.grad == 0).all()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_shapes_are_known_on_the_meta_device(recipe):
    """For counters of FLOPs and shapes, a model under convert and one under autocast."""
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for by_autocast in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16, device="meta"))
        if not by_autocast:
            nn.convert(model, recipe)
        with nn.autocast(recipe=recipe) if by_autocast else contextlib.nullcontext():
            out = model(x)
        out.sum().backward()
        assert out.shape == (4, 32) and model[0].weight.grad.shape == (32, 64)


def test_high_precision_gradients(generator, device):
    linear = make("bf16", device=device)
    assert_gemms(linear, *step(linear, generator), output_db=100.0, grad_db=100.0)


def test_frozen_weight_and_frozen_input(generator):
    linear = make("blockwise")
    linear.weight.requires_grad_(False)
    x, _, _ = step(linear, generator)
    assert x.grad is not None
    assert linear.weight.grad is None
    linear.weight.requires_grad_(True)
    linear(torch.randn(4, 344, generator=generator)).sum().backward()
    assert linear.weight.grad is not None


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=pytest.mark.slow if r == "blockwise" else pytest.mark.largest) for r in FP8_RECIPES],
)
def test_llama_ffn(recipe):
    """The Llama feed-forward block, 1024 / 4096, and once as wide inside as that of 4096: output and every gradient.

    What width alone can break, the sums over 16384 and 32768, is the same code for every recipe; the scales' errors do
    not depend on it.
    """
    torch.manual_seed(0)
    hidden, inside = 1024, 16384 if recipe == "blockwise" else 4096
    block = nn.MLP(hidden, inside, dtype=torch.float32)
    for linear in (block.gate_up_proj, block.down_proj):
        torch.nn.init.normal_(linear.weight, std=0.02)
    x = torch.randn(128, hidden, requires_grad=True)
    grad = torch.randn(128, hidden)
    results = []
    for name in ("bf16", recipe):
        nn.convert(block, name)
        for _ in range(2 if name == "delayed" else 1):
            nn.mark_weights_updated(block)  # as after a step; delayed scaling's first scale is 1
            block.zero_grad()
            x.grad = None
            out = block(x)
            out.backward(grad)
        results.append([out.detach(), x.grad, block.gate_up_proj.weight.grad, block.down_proj.weight.grad])
    for what, reference, actual in zip(("out", "x", "gate_up", "down"), *results, strict=True):
        assert_sqnr(actual, reference, 20.0, what)
