"""Norm, MLP, attention and the log-probability loss: exact and inexact paths agree, gradients match autograd."""

import pytest
import torch

from octavo import nn
from octavo.errors import ShapeError
from octavo.numerics import Numerics, get_recipe
from octavo.ops.attention import KVScaleTable, quantize_kv
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_raises


def layer(width=64, ffn=96, heads=4, kv_heads=2, dim=32, dtype=torch.float32):
    torch.manual_seed(0)
    rope = nn.RotaryEmbedding(dim, 256)
    attention = nn.Attention(width, heads, kv_heads, dim, layer_index=0, rope=rope, qk_norm_eps=1e-6, dtype=dtype)
    block = nn.DecoderLayer(attention, nn.MLP(width, ffn, dtype=dtype), width, 1e-6, dtype=dtype)
    for p in block.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.1)
    return block


def gradients(block, x, context):
    x = x.clone().requires_grad_()
    block.zero_grad()
    out = block(x, context)
    out.backward(torch.sin(torch.arange(out.numel(), device=out.device).view_as(out).float()))
    return {"out": out.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in block.named_parameters()}


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_exact_layer_agrees_with_the_library_layer(kv, generator, device):
    block = layer().to(device)
    x = torch.randn(50, 64, generator=generator).to(device)
    numerics = Numerics(kv_cache_dtype=kv)
    fast = gradients(block, x, nn.PackedContext.from_lengths([30, 1, 19], numerics, device))
    nn.set_exact(block, True)
    numerics = Numerics(kv_cache_dtype=kv, exact=True)
    exact = gradients(block, x, nn.PackedContext.from_lengths([30, 1, 19], numerics, device))
    for name, value in exact.items():
        assert_sqnr(value, fast[name], 80.0 if kv == "bf16" else 40.0, name)  # a code may flip at a tie of FP8 K and V


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_exact_layer_does_not_depend_on_packing(recipe, generator):
    block = layer(344, 200, dtype=torch.bfloat16)
    nn.convert(block, recipe, exact=True)
    numerics = Numerics(get_recipe(recipe), "fp8", True)
    x = torch.randn(90, 344, generator=generator).bfloat16()
    whole = block(x, nn.PackedContext.from_lengths([20, 1, 69], numerics)).detach()
    for first, end in ((20, 21), (21, 90), (21, 60)):
        alone = nn.PackedContext.from_lengths([end - first], numerics)
        assert_bitwise(block(x[first:end], alone).detach(), whole[first:end])


@pytest.mark.parametrize("is_known", [True, False], ids=["known scales", "a scale a token"])
def test_a_fast_pass_applies_both_kv_scales(is_known, generator):
    """As a cache in FP8 would give them back: what a bf16 context computes from the decoded ones."""
    q, k, v = (torch.randn(10, heads, 32, generator=generator) for heads in (4, 2, 2))
    numerics, table = Numerics(kv_cache_dtype="fp8", kv_scales="trainer" if is_known else "per_token_head"), None
    if is_known:
        table = KVScaleTable(1, "trainer")
        table.set({0: (torch.tensor(0.0625), torch.tensor(0.03125))}, 0)
    scales = table.scale[0] if table else [x.abs().amax(dim=-1, keepdim=True) / 448 for x in (k, v)]
    pairs = zip((k, v), scales, strict=True)
    decoded = [(x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for x, scale in pairs]
    out = nn.PackedContext.from_lengths([10], numerics, kv_table=table).attend(0, q, k, v, softmax_scale=0.2)
    wanted = nn.PackedContext.from_lengths([10]).attend(0, q, *decoded, softmax_scale=0.2)
    assert_sqnr(out, wanted, 60.0)


def test_saved_keys_and_values_are_fp8(generator):
    q = torch.randn(10, 4, 32, generator=generator, requires_grad=True)
    k, v = (torch.randn(10, 2, 32, generator=generator, requires_grad=True) for _ in range(2))
    context = nn.PackedContext.from_lengths([10], Numerics(kv_cache_dtype="fp8", exact=True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        context.attend(0, q, k, v, softmax_scale=0.2)
    assert [t.dtype for t in saved[1:3]] == [torch.float8_e4m3fn] * 2
    assert_bitwise(saved[1], quantize_kv(k.detach())[0])


def test_token_logprobs_chunks_keep_the_bits(generator):
    hidden, head = (torch.randn(n, 344, generator=generator).bfloat16() for n in (70, 50))
    targets = torch.zeros(70, dtype=torch.int64)
    whole, _ = nn.token_logprobs(hidden, head, targets, exact=True)
    for chunk in (1, 7, 64):
        assert_bitwise(nn.token_logprobs(hidden, head, targets, exact=True, chunk_size=chunk)[0], whole)
    assert_bitwise(nn.token_logprobs(hidden[5:6], head, targets[5:6], exact=True)[0], whole[5:6])
    assert_raises(ShapeError, "targets must have shape", nn.token_logprobs, hidden, head, targets[:3])


def test_rope_tables_stay_fp32():
    rope = nn.RotaryEmbedding(32, 8).to(torch.bfloat16)
    assert rope.cos.dtype == torch.float32


def test_heads_and_lengths_must_fit():
    assert nn.PackedContext.from_lengths([3, 0, 2]).positions.tolist() == [0, 1, 2, 0, 1]
    assert_raises(ShapeError, "rise from 0", nn.PackedContext, torch.tensor([0, 4, 2]))
    with pytest.raises(ShapeError, match="multiple of num_kv_heads"):
        nn.Attention(64, 3, 2, 32, layer_index=0, rope=nn.RotaryEmbedding(32, 8))
