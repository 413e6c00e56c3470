"""SparseMoE and GroupedLinear: against plain torch and autograd, against single linears, bits of a token alone."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from octavo import nn
from octavo.errors import ConfigError, RecipeError, ShapeError
from octavo.numerics import get_recipe
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.tolerances import E4M3_NORMAL_DB, GEMM_FAST_ACCUMULATION_DB, LINEAR_DB
from tests.assertions import assert_all_bitwise, assert_all_sqnr, assert_raises
from tests.recipes import FP8_RECIPES as FP8

HIDDEN, INNER, EXPERTS, USED = 128, 72, 8, 3


def make(dtype=torch.float32, device="cpu", inner=INNER, **options):
    torch.manual_seed(3)
    moe = nn.SparseMoE(HIDDEN, inner, EXPERTS, USED, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.1)
    return moe.to(device)


def make_linear(recipe, parts=(256,), k=384, dtype=torch.bfloat16, device="cpu", **overrides):
    torch.manual_seed(1)
    linear = nn.GroupedLinear(k, sum(parts), 4, parts=parts, dtype=dtype)
    linear.set_recipe(get_recipe(recipe, **overrides))
    return linear.to(device)


def plain(x, moe, normalize=True):
    """What the block computes, expert by expert, for autograd to follow."""
    probs = torch.softmax(x.float() @ moe.gate.weight.float().t(), dim=-1)
    weights, chosen = probs.topk(USED, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    gate_up, down = (m.expert_weights() for m in (moe.experts.gate_up_proj, moe.experts.down_proj))
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ gate_up[expert].t()).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ down[expert].t()
        share = torch.where(chosen == expert, weights, 0.0).sum(dim=-1, keepdim=True)
        total = total + share.to(x.dtype) * out
    return total


def gradients(run, x, moe, grad):
    moe.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    out.backward(grad)
    return [out.detach(), x.grad, *(parameter.grad for parameter in moe.parameters())]


@pytest.mark.parametrize("normalize", [True, False])
def test_against_plain_torch_and_autograd(normalize, generator, device):
    moe = make(norm_topk_prob=normalize, device=device)
    x, grad = (torch.randn(50, HIDDEN, generator=generator).to(device) for _ in range(2))
    ours = gradients(moe, x, moe, grad)
    theirs = gradients(lambda x: plain(x, moe, normalize), x, moe, grad)
    assert len(ours) == 5
    for got, expected in zip(ours, theirs, strict=True):
        assert expected.abs().max() > 0
        assert_sqnr(got, expected, 100.0)


@pytest.mark.parametrize("inner", [INNER, 128], ids=["ragged", "whole"])
@pytest.mark.parametrize("overrides", [{}, {"backward": "bf16"}, {"high_precision_gemms": ("grad_weight",)}], ids=str)
@pytest.mark.parametrize("recipe", FP8)
def test_fp8_against_high_precision(recipe, overrides, inner, generator, device):
    moe = make(torch.bfloat16, device=device, inner=inner)
    x, grad = (torch.randn(50, HIDDEN, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    expected = gradients(moe, x, moe, grad)
    nn.convert(moe, get_recipe(recipe, **overrides))
    for _ in range(2 if recipe == "delayed" else 1):  # its first step has no scales yet
        got = gradients(moe, x, moe, grad)
    assert_all_sqnr(got, expected, 15.0)
    assert not torch.equal(got[0], expected[0])


@pytest.mark.parametrize("parts", [(256,), (128, 128), (200, 56)], ids=str)
@pytest.mark.parametrize("k", [384, 344])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_each_experts_codes_are_a_linears(recipe, k, parts, generator, device):
    """Forward and backward: fused in storage, never in meaning."""
    linear = make_linear(recipe, parts, k, device=device)
    for expert, weight in enumerate(linear.expert_weights()):
        alone = nn.Linear(k, sum(parts), parts=parts, device=device)
        alone.weight.data.copy_(weight)
        for dim, name in enumerate(("forward_operands", "backward_operands")):
            grouped, dense = (getattr(layer, name)(linear.recipe) for layer in (linear, alone))
            decoded = [
                codes[expert].dequantize() if len(codes) > 1 else codes[0].dequantize().chunk(4)[expert]
                for _, codes in linear.source.shapes.by_expert(grouped)
            ]
            assert_bitwise(torch.cat(decoded, dim), torch.cat([q.dequantize() for _, q in dense], dim))


@pytest.mark.parametrize("parts", [(256,), (200, 56)], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "blockwise"])
def test_each_experts_gradients_are_a_linears(recipe, parts, generator, device):
    """Blocks of tokens begin with the expert's first one, so what others were sent does not matter."""
    linear = make_linear(recipe, parts, dtype=torch.float32, device=device)
    alignment = linear.alignment(torch.device(device), training=True)
    assert alignment % 128 == 0 if recipe == "blockwise" else alignment in (1, 16)
    sizes = [48, 0, 160, 16]
    padded = [-(-size // alignment) * alignment for size in sizes]
    offsets = torch.tensor(padded, device=device).cumsum(0).int()
    x, grad = (torch.zeros(sum(padded), width, device=device) for width in (384, sum(parts)))
    starts = [int(end) - size for end, size in zip(offsets, padded, strict=True)]
    for start, size in zip(starts, sizes, strict=True):
        for tensor in (x, grad):
            tensor[start : start + size] = torch.randn(size, tensor.shape[1], generator=generator).to(device)
    x.requires_grad_()
    out = linear(x, offsets)
    out.backward(grad)
    for expert, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        alone = nn.Linear(384, sum(parts), parts=parts, dtype=torch.float32, device=device)
        alone.weight.data.copy_(linear.expert_weights()[expert])
        alone.recipe = linear.recipe
        own = x.detach()[rows].requires_grad_()
        expected = alone(own)
        expected.backward(grad[rows])
        weight_grad = linear.weight.grad.view(4, sum(parts), 384)[expert]
        if not size:
            assert not weight_grad.any()
            continue
        for got, wanted in ((out[rows], expected), (x.grad[rows], own.grad), (weight_grad, alone.weight.grad)):
            floor = 90.0 if wanted.device.type == "cpu" else GEMM_FAST_ACCUMULATION_DB
            assert_sqnr(got.detach(), wanted.detach(), floor)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed"])
def test_gradients_with_scales_that_experts_share(recipe, generator, device):
    linear = make_linear(recipe, fp8_format="e4m3", dtype=torch.float32, device=device)
    offsets = torch.tensor([48, 48, 208, 224], device=device).int()
    x, grad = (torch.randn(224, width, generator=generator).to(device) for width in (384, 256))
    for _ in range(2 if recipe == "delayed" else 1):
        linear.zero_grad()
        own = x.detach().requires_grad_()
        linear(own, offsets).backward(grad)
    weights = linear.expert_weights().detach()
    for expert, rows in ((0, slice(0, 48)), (2, slice(48, 208)), (3, slice(208, 224))):
        assert_sqnr(own.grad[rows], grad[rows] @ weights[expert], LINEAR_DB)
        assert_sqnr(linear.weight.grad.view(4, 256, 384)[expert], grad[rows].t() @ x[rows], LINEAR_DB)
    assert not linear.weight.grad.view(4, 256, 384)[1].any()


@pytest.mark.parametrize("inner", [INNER, 128], ids=["ragged", "whole"])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
def test_exact_a_token_does_not_see_its_neighbours(recipe, inner, generator, device):
    moe = make(torch.bfloat16, device=device, inner=inner)
    nn.convert(moe, recipe, exact=True)
    x = torch.randn(70, HIDDEN, generator=generator).to(device, torch.bfloat16)
    whole = moe(x).detach()  # with gradients on, groups are padded for the backward
    with torch.no_grad():
        for rows in ([0], [69], [3, 60], list(range(64)), list(range(69, -1, -3))):
            assert_bitwise(moe(x[rows]), whole[rows])


@pytest.mark.parametrize("inner", [INNER, 128], ids=["ragged", "whole"])
@pytest.mark.parametrize("recipe", FP8)
def test_inference_has_the_bits_of_the_plain_path(recipe, inner, generator, device):
    """Each token quantized once, SwiGLU into codes: against copies of tokens that are quantized apart."""
    moe = make(torch.bfloat16, device=device, inner=inner)
    nn.convert(moe, recipe)
    x = torch.randn(37, HIDDEN, generator=generator).to(device, torch.bfloat16)
    gradients(moe, x, moe, torch.ones_like(x))  # delayed scaling has scales after it
    experts = moe.experts
    assert not experts.can_infer(experts.gate_up_proj.recipe)  # gradients are on
    with torch.no_grad():
        assert experts.can_infer(experts.gate_up_proj.recipe)
        found = [moe(rows) for rows in (x, x[:1], x[:0])]
        seen = []
        watcher = experts.register_forward_hook(lambda _, inputs, out: seen.append(out))
        nn.plan_fusion(moe)
        for got, rows in zip(found, (x, x[:1], x[:0]), strict=True):
            assert_bitwise(got, moe(rows))
        assert len(seen) == 3
        watcher.remove()
        nn.plan_fusion(moe)
        experts.down_proj.set_recipe(get_recipe("bf16"))
        assert not experts.can_infer(experts.gate_up_proj.recipe)


def test_shared_scales_are_not_exact(generator):
    """The negative control of the test above."""
    moe = make(torch.bfloat16)
    nn.convert(moe, "tensorwise")
    x = torch.randn(70, HIDDEN, generator=generator).to(torch.bfloat16)
    with torch.no_grad():
        assert not torch.equal(moe(x[:1]), moe(x)[:1])


def test_what_convert_does_and_says(generator):
    moe = make(torch.bfloat16)
    report = nn.convert(moe, "blockwise")
    experts = [(f"experts.{name}", "blockwise", USED / EXPERTS) for name in ("gate_up_proj", "down_proj")]
    assert [(row.name, row.recipe, row.active_share) for row in report.rows] == [*experts, ("gate", None, 1.0)]
    assert "router" in report.rows[-1].reason
    inner = 3 * INNER * HIDDEN * USED
    assert report.fp8_flop_share == pytest.approx(inner / (inner + EXPERTS * HIDDEN))
    report = nn.convert(moe, "blockwise", overrides={"down_proj": "bf16"})
    assert [row.recipe for row in report.rows] == ["blockwise", None, None]
    x = torch.randn(5, HIDDEN, generator=generator).to(torch.bfloat16)
    moe(x).float().sum().backward()
    assert all(parameter.grad is not None for parameter in moe.parameters())


def test_codes_only_gives_the_same_bits(generator, device):
    moe = make(torch.bfloat16, device=device)
    nn.convert(moe, "blockwise")
    x = torch.randn(20, HIDDEN, generator=generator).to(device, torch.bfloat16)
    expected = gradients(moe, x, moe, torch.ones_like(x))[:2]
    moe.requires_grad_(False)
    assert nn.keep_codes_only(moe) == 2 * 3 * EXPERTS * INNER * HIDDEN
    x.requires_grad_()
    out = moe(x)
    out.backward(torch.ones_like(x))
    assert_bitwise(out.detach(), expected[0])
    assert_sqnr(x.grad, expected[1], E4M3_NORMAL_DB)
    nn.convert(moe, "bf16")
    assert_raises(RecipeError, "FP8 codes only", moe, x)


def test_new_weights_are_quantized_again(generator):
    moe = make(torch.bfloat16)
    nn.convert(moe, "rowwise")
    x = torch.randn(20, HIDDEN, generator=generator).to(torch.bfloat16)
    gradients(moe, x, moe, torch.ones_like(x))
    optimizer = torch.optim.SGD(moe.parameters(), lr=1.0)
    optimizer.step()
    fresh = copy.deepcopy(moe)
    for got, expected in zip(*(gradients(m, x, m, torch.ones_like(x)) for m in (moe, fresh)), strict=True):
        assert_bitwise(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
def test_it_compiles_whole(recipe, generator):
    moe = make(torch.bfloat16)
    nn.convert(moe, recipe)
    x = torch.randn(20, HIDDEN, generator=generator).to(torch.bfloat16)
    grad = torch.ones_like(x)
    compiled = gradients(torch.compile(moe, fullgraph=True, backend="aot_eager"), x, moe, grad)
    compiled = [tensor.clone() for tensor in compiled]
    assert_all_bitwise(compiled, gradients(moe, x, moe, grad))


def test_padding_is_for_the_libraries_and_for_training():
    moe = make(torch.bfloat16)
    device = torch.device("cuda")  # nothing runs on it
    for recipe, inference, training in (("bf16", 16, 16), ("rowwise", 1, 16), ("blockwise", 1, 128)):
        nn.convert(moe, recipe)
        found = [moe.experts.alignment(device, training=t) for t in (False, True)]
        assert found == [inference, training]
    nn.convert(moe, get_recipe("blockwise", high_precision_gemms=("output",)))
    assert moe.experts.alignment(device, training=False) == 16
    for recipe, training in (("bf16", 16), ("rowwise", 16), ("blockwise", 128)):
        nn.convert(moe, recipe, exact=True)  # kernels of our own take any rows
        assert [moe.experts.alignment(device, training=t) for t in (False, True)] == [1, training]


def test_inference_compiles_whole(generator):
    moe = make(torch.bfloat16)
    nn.convert(moe, "blockwise")
    x = torch.randn(20, HIDDEN, generator=generator).to(torch.bfloat16)
    with torch.no_grad():
        assert_bitwise(torch.compile(moe, fullgraph=True, backend="aot_eager")(x), moe(x))


def test_no_tokens(generator, device):
    moe = make(torch.bfloat16, device=device)
    nn.convert(moe, "blockwise")
    x = torch.zeros(0, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = moe(x)
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    assert not moe.experts.down_proj.weight.grad.any()


def test_an_observer_sees_every_role(generator):
    moe = make(torch.bfloat16)
    nn.convert(moe, "blockwise")
    seen = set()
    for module in (moe.experts.gate_up_proj, moe.experts.down_proj):
        module.observer = lambda role, tensor, codes: seen.add((role, codes is not None))
    x = torch.randn(9, HIDDEN, generator=generator).to(torch.bfloat16)
    gradients(moe, x, moe, torch.ones_like(x))
    assert {role for role, _ in seen} == {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}


def test_bad_arguments_are_refused():
    assert_raises(ConfigError, "num_experts_per_tok", nn.SparseMoE, 8, 8, 4, 5)
    assert_raises(ShapeError, "parts", nn.GroupedLinear, 8, 8, 4, parts=(4, 3))
    moe = make(torch.bfloat16)
    nn.convert(moe, dataclasses.replace(get_recipe("blockwise"), fake_quant=True))
    assert_raises(RecipeError, "decoded again", moe, torch.zeros(4, HIDDEN, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="in_features=128"):
        moe.experts.gate_up_proj(torch.zeros(4, 8), torch.zeros(8, dtype=torch.int32))
