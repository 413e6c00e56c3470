"""A router's routing as one function: what its parts add up to, and which tokens are routed so."""

import pytest
import torch

from octavo import nn
from octavo.errors import ConfigError, ShapeError
from octavo.nn import moe as block
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.moe import moe_routing, router
from octavo.ops.moe.router import route_tokens, router_logits, takes_tokens
from octavo.ops.moe.router.reference import (
    NUM_PARTS,
    part_columns,
    route_tokens_reference,
    router_parts_reference,
)
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_all_bitwise, assert_raises


def operands(T, E, K, generator, device="cpu", dtype=torch.bfloat16):
    return [torch.randn(rows, K, generator=generator).to(device, dtype) for rows in (T, E)]


@pytest.mark.parametrize("K", [1, 100, 128, 2000, 2048])
def test_parts_cover_k_once(K, generator):
    x, weight = operands(5, 8, K, generator, dtype=torch.float32)
    parts = router_parts_reference(x, weight)
    assert parts.shape == (NUM_PARTS, 5, 8)
    assert_sqnr(parts.sum(0), x.double() @ weight.double().t(), 100.0)
    each = part_columns(K)
    assert each % 16 == 0 and NUM_PARTS * each >= K
    assert_sqnr(parts[0], x[:, :each].double() @ weight[:, :each].double().t(), 100.0)


def test_parts_are_added_one_after_the_other(generator):
    parts = torch.randn(NUM_PARTS, 9, 8, generator=generator)
    parts[1], parts[6] = parts[1] + 1000, parts[6] - 1000
    logits = torch.zeros(9, 8)
    for part in parts:
        logits = logits + part
    found = moe_routing(parts, 3, normalize=True, alignment=16)
    assert_all_bitwise(found, moe_routing(logits, 3, normalize=True, alignment=16))
    assert_raises(ShapeError, "matrix", moe_routing, parts, 3, normalize=True, experts=found.experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_on_a_cpu_logits_are_the_product(dtype, generator):
    x, weight = operands(37, 16, 200, generator)
    weight = weight.to(dtype) * 1.001  # in fp32 it has bits that the product does not see
    assert not takes_tokens(x, weight)
    assert_bitwise(router_logits(x, weight), hp_mm(x, weight.bfloat16(), out_dtype=torch.float32))


def test_in_parts_it_is_the_references_routing(monkeypatch, generator):
    x, weight = operands(37, 16, 200, generator)
    monkeypatch.setattr(router, "takes_tokens", lambda x, weight: True)
    found = route_tokens(x, weight, 4, normalize=True, alignment=16)
    assert_all_bitwise(found, moe_routing(router_logits(x, weight), 4, normalize=True, alignment=16))
    assert not torch.equal(router_logits(x, weight), hp_mm(x, weight, out_dtype=torch.float32))
    expected = route_tokens_reference(x, weight, 4, True, 16)
    assert_sqnr(found.weights, expected[0], 90.0)
    assert_all_bitwise([found.experts, *found[3:]], [expected[1], *expected[3:]])


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_router_that_is_called_has_the_bits_of_one_that_is_not(is_exact, monkeypatch, generator):
    """In inference; exact ones and those that train have one product."""
    moe, x = make(), torch.randn(9, 128, generator=generator).bfloat16()
    nn.convert(moe, "blockwise", exact=is_exact)
    trained = moe.gate(x).detach()
    for module in (block, router):
        monkeypatch.setattr(module, "takes_tokens", lambda x, weight: True)
    assert_bitwise(moe.gate(x).detach(), trained)
    with torch.no_grad():
        out, logits = moe(x), moe.gate(x)
        moe.gate.register_forward_hook(lambda *_: None)
        assert_bitwise(moe(x), out)
    assert torch.equal(logits, trained) == is_exact


@pytest.mark.parametrize("is_taken", [False, True])
def test_bad_arguments_are_refused(is_taken, monkeypatch, generator):
    x, weight = operands(4, 8, 32, generator)
    monkeypatch.setattr(router, "takes_tokens", lambda x, weight: is_taken)
    assert_raises(ShapeError, "agree in K", route_tokens, x, weight[:, :16], 2, normalize=True)
    assert_raises(ShapeError, "agree in K", router_logits, x, weight[:, :16])
    assert_raises(ConfigError, "top_k", route_tokens, x, weight, 9, normalize=True)


@pytest.fixture
def routed(monkeypatch):
    """As on Hopper: whether each routing may read ahead, of the calls that are made."""
    calls = []
    for module in (block, router):
        monkeypatch.setattr(module, "takes_tokens", lambda x, weight: x.shape[0] <= 9)

    def spy(*args, reads_ahead, **options):
        calls.append(reads_ahead)
        return route_tokens(*args, **options)

    monkeypatch.setattr(block, "route_tokens", spy)
    return calls


def make():
    torch.manual_seed(0)
    moe = nn.SparseMoE(128, 128, 8, 2)
    nn.convert(moe, "blockwise")
    return moe


def test_inference_routes_so(routed, generator):
    moe, x = make(), torch.randn(9, 128, generator=generator).bfloat16()
    recorded = []
    moe.recorder = recorded.append
    with torch.no_grad():
        out = moe(x)
        assert routed == [False]
        moe.forward_norm(x, None, nn.RMSNorm(128, dtype=torch.bfloat16))
        assert routed == [False, True]  # the norm is the kernel before
        moe(torch.cat((x, x)))
        assert len(routed) == 2  # the router is called for more tokens
    assert_sqnr(out, moe(x).detach(), 50.0)  # gradients on: another order of sums, rounded to bf16
    assert len(recorded) == 4 and recorded[0].shape == (9, 2)


@pytest.mark.parametrize("case", ["gradients", "exact", "replay", "hook", "own forward", "subclass"])
def test_whatever_needs_the_logits_has_them(case, routed, generator):
    moe, x = make(), torch.randn(9, 128, generator=generator).bfloat16()
    asked = []
    if case == "exact":
        nn.convert(moe, "blockwise", exact=True)
    elif case == "replay":
        moe.replay = lambda own: own
    elif case == "hook":
        moe.gate.register_forward_hook(lambda *call: asked.append(call[2]))
    elif case == "own forward":
        moe.gate.forward = lambda x: torch.zeros(9, 8)
    elif case == "subclass":
        moe.gate.__class__ = type("Other", (nn.Router,), {})
    with torch.set_grad_enabled(case == "gradients"):
        moe(x)
    assert not routed and len(asked) == (case == "hook")
