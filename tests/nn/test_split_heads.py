"""Attention's heads in one step have the bits of its modules one after the other: values, losses and gradients."""

import pytest
import torch

from octavo import nn
from octavo.models import Decoder, ModelConfig
from octavo.nn import attention, attention_context
from octavo.nn.attention_context import _RoundKV
from octavo.nn.functional.split_heads import split_heads
from octavo.numerics import Numerics, get_recipe
from octavo.ops.attention import KVRounding
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_all_bitwise

LLAMA = ModelConfig("llama", 96, 128, 256, 2, 4, 2, 32, attention_bias=True, max_position_embeddings=64)
QWEN3 = ModelConfig("qwen3", 96, 128, 256, 2, 4, 4, 32, qk_norm=True, max_position_embeddings=64)
KNOWN = torch.tensor([0.02, 0.5])


def by_modules(qkv, kv_heads, rope, norms, positions, rounding):
    """What Attention runs where its modules are hooked."""
    q, k, v = qkv.unflatten(-1, (-1, 32)).split([qkv.shape[1] // 32 - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms:
        q, k = (norm(x) for norm, x in zip(norms, (q, k), strict=True))
    q, k = rope(q, positions), rope(k, positions)
    if rounding is not None:
        k, v = (_RoundKV.apply(x, rounding, i) for i, x in enumerate((k, v)))
    return q, k, v


@pytest.mark.parametrize("rounding", [None, KVRounding(), KVRounding(KNOWN, 1 / KNOWN)], ids=["none", "own", "known"])
@pytest.mark.parametrize("norms", ["exact", "norms", "plain"])
@pytest.mark.parametrize(
    ("turned", "interleaved"), [(32, False), (16, False), (32, True), (16, True)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_gradients(dtype, turned, interleaved, norms, rounding, generator, device) -> None:
    tokens, heads, kv_heads = 37, 6, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * 32, generator=generator).to(device, dtype).requires_grad_()
    rope = nn.RotaryEmbedding(turned, 64, interleaved=interleaved).to(device)
    positions = torch.arange(tokens, device=device) * 7 % 64
    modules = [nn.RMSNorm(32, 1e-5, dtype=dtype, device=device) for _ in range(2)] if norms != "plain" else []
    for norm in modules:
        norm.exact = norms == "exact"
        with torch.no_grad():
            norm.weight += 0.1 * torch.randn(32, generator=generator).to(device, dtype)
    rounding = None if rounding is None else KVRounding(*(x if x is None else x.to(device) for x in rounding))
    weights = [norm.weight for norm in modules]
    given = HeadNorms(*weights, 1e-5, norms == "exact") if weights else None
    rotation = Rotation(positions, rope.cos, rope.sin, interleaved)
    found = split_heads(qkv, kv_heads, 32, rotation, given, rounding)
    wanted = by_modules(qkv, kv_heads, rope, modules, positions, rounding)
    assert_all_bitwise(found, wanted)
    grads = [torch.randn(x.shape, generator=generator).to(device, dtype) for x in found]
    of_found, of_wanted = (torch.autograd.grad(heads, (qkv, *weights), grads) for heads in (found, wanted))
    assert_bitwise(of_found[0], of_wanted[0], "grad_qkv")
    for one, other in zip(of_found[1:], of_wanted[1:], strict=True):
        if device.type == "cpu":
            assert_bitwise(one, other)
        else:  # sums over tokens in another order
            assert_sqnr(one, other, 45.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[KVRounding | None]:
    """How K and V were to be rounded by each fused step."""
    found: list[KVRounding | None] = []
    run = attention.split_heads
    monkeypatch.setattr(attention, "split_heads", lambda *a: (found.append(a[-1]), run(*a))[1])
    return found


@pytest.fixture
def num_rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each K or V that attention's context itself rounds."""
    found: list[int] = []
    run = attention_context.round_kv
    monkeypatch.setattr(attention_context, "round_kv", lambda *a: (found.append(a[-1]), run(*a))[1])
    return found


def model_of(config: ModelConfig, numerics: Numerics, device: torch.device, is_hooked: bool) -> Decoder:
    model = Decoder(config, seed=3).to(device)
    model.set_numerics(numerics)
    if model.kv_table is not None:
        model.kv_table.set({i: tuple(KNOWN) for i in range(config.num_layers)}, model.weight_version)
    if is_hooked:
        for layer in model.layers:
            layer.self_attn.rope.register_forward_hook(lambda *_: None)
        nn.plan_fusion(model)
    return model


def step(model: Decoder, checkpoints: bool = False) -> list[torch.Tensor]:
    """Loss and gradients over three packed sequences."""
    ids = (torch.arange(41, device=model.device) * 29 + 5) % 96
    context = nn.PackedContext.from_lengths([17, 1, 23], model.numerics, model.device, model.kv_table)
    if checkpoints:
        hidden = torch.utils.checkpoint.checkpoint(lambda: model(ids, context), use_reentrant=False)
    else:
        hidden = model(ids, context)
    loss = -nn.token_logprobs(hidden, model.head_weight, ids.roll(-1), exact=model.numerics.exact)[0].sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


KINDS = {
    "bf16 cache": (Numerics(), False),
    "fp8 cache": (Numerics(get_recipe("blockwise"), "fp8"), True),
    "known scales": (Numerics(get_recipe("rowwise"), "fp8", kv_scales="trainer"), True),
    "fp8 attention": (Numerics(get_recipe("rowwise"), "fp8", attention_dtype="fp8"), False),
    "exact": (Numerics(get_recipe("rowwise"), "fp8", True), False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=lambda config: config.family)
def test_a_models_loss_and_gradients_are_those_of_its_modules(config, kind, calls, num_rounded, device) -> None:
    """And K and V are rounded once: in the fused step, or by attention where it quantizes them."""
    numerics, is_rounded_before = KINDS[kind]
    found = step(model_of(config, numerics, device, is_hooked=False))
    assert [call is not None for call in calls] == [is_rounded_before] * config.num_layers
    assert not num_rounded
    calls.clear()
    wanted = step(model_of(config, numerics, device, is_hooked=True))
    assert not calls and len(num_rounded) == 2 * config.num_layers * is_rounded_before
    if device.type == "cpu":
        assert_all_bitwise(found, wanted)
    else:  # the weights' gradients of QK-norm are sums in another order
        assert_bitwise(found[0], wanted[0])


def test_under_activation_checkpoints(calls) -> None:
    model, other = (model_of(QWEN3, KINDS["fp8 cache"][0], torch.device("cpu"), False) for _ in "ab")
    assert_all_bitwise(step(model, checkpoints=True), step(other))
    assert len(calls) == 6  # twice under checkpoints


def test_a_hooked_norm_is_called(calls) -> None:
    model, seen = model_of(QWEN3, Numerics(), torch.device("cpu"), False), []
    model.layers[1].self_attn.k_norm.register_forward_hook(lambda *_: seen.append(1))
    nn.plan_fusion(model)
    step(model)
    assert seen == [1] and len(calls) == 1


def test_with_norms_v_is_a_view_of_the_projection(generator) -> None:
    """Their backward keeps it anyway."""
    rope, weights = nn.RotaryEmbedding(32, 64), [torch.ones(32, requires_grad=True) for _ in "qk"]
    qkv = torch.randn(9, 8 * 32, generator=generator, requires_grad=True)
    rotation, norms = Rotation(torch.arange(9), rope.cos, rope.sin), HeadNorms(*weights, 1e-6)
    for rounding, is_view in ((None, True), (KVRounding(), False)):
        v = split_heads(qkv, 2, 32, rotation, norms, rounding)[2]
        assert (v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()) == is_view


def test_without_norms_nothing_of_the_projection_is_saved(generator) -> None:
    """Its memory goes as soon as the heads are there."""
    rope = nn.RotaryEmbedding(32, 64)
    qkv = torch.randn(9, 8 * 32, generator=generator, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        heads = split_heads(qkv, 2, 32, Rotation(torch.arange(9), rope.cos, rope.sin), None, None)
    assert sorted(t.numel() for t in saved) == [0, 9, rope.cos.numel(), rope.cos.numel()]
    assert all(t.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr() for t in heads)


def test_a_context_that_looks_at_keys_gets_them_before_they_are_rounded(calls) -> None:
    """One that is a PackedContext within, as calibration's is, and not told of any rounding."""
    model, seen = model_of(LLAMA, KINDS["fp8 cache"][0], torch.device("cpu"), False), []
    packed = nn.PackedContext.from_lengths([9], model.numerics)

    class Looking:
        positions = packed.positions

        def attend(self, layer_index, q, k, v, *, softmax_scale):
            seen.append(k)
            return packed.attend(layer_index, q, k, v, softmax_scale=softmax_scale)

    ids = torch.arange(9)
    assert_bitwise(model(ids, Looking()), model(ids, packed))
    assert calls[:2] == [None, None] and None not in calls[2:] and len(seen) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize(("has_norms", "rounds"), [(True, False), (False, True)])
def test_compiled_whole(has_norms, rounds, generator) -> None:
    torch._dynamo.reset()
    rope, weights = nn.RotaryEmbedding(32, 64), [torch.ones(32, requires_grad=True) for _ in range(has_norms and 2)]
    qkv = torch.randn(9, 8 * 32, generator=generator, requires_grad=True)

    def heads(qkv: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        norms = HeadNorms(*weights, 1e-6) if weights else None
        rotation = Rotation(torch.arange(9), rope.cos, rope.sin)
        return [x.sin() for x in split_heads(qkv, 2, 32, rotation, norms, KVRounding() if rounds else None)]

    found, wanted = (
        torch.autograd.grad([x.sum() for x in call(qkv, *weights)], (qkv, *weights))
        for call in (torch.compile(heads, fullgraph=True, backend="aot_eager"), heads)
    )
    assert_all_bitwise(found, wanted)
