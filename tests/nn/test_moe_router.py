"""The router's losses, statistics and replayed choices: against plain torch and autograd."""

import pytest
import torch

from octavo import nn
from octavo.errors import ConfigError, DtypeError, ShapeError
from octavo.nn.checkpoint import checkpoint
from octavo.nn.load_balance import RouterStatistics, load_balancing_loss, metrics_of, router_z_loss
from octavo.nn.router_watch import RouterWatch, sparse_blocks
from octavo.ops.moe import moe_routing
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_all_sqnr, assert_raises

from .test_moe import EXPERTS, HIDDEN, USED, gradients, make


def random_choice(num_tokens, generator, device, unused=()):
    """Distinct experts a token, in any order, none of the unused."""
    scores = torch.rand(num_tokens, EXPERTS, generator=generator)
    scores[:, list(unused)] = -1.0
    return scores.topk(USED, dim=1).indices.to(device)


def plain_given(x, moe, experts):
    """What the block computes of given experts, for autograd to follow."""
    probs = torch.softmax(x.float() @ moe.gate.weight.float().t(), dim=-1)
    weights = probs.gather(1, experts)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    gate_up, down = (m.expert_weights() for m in (moe.experts.gate_up_proj, moe.experts.down_proj))
    total = torch.zeros_like(x)
    for slot in range(USED):
        gate, up = torch.einsum("th,toh->to", x, gate_up[experts[:, slot]]).chunk(2, dim=-1)
        out = torch.einsum("ti,toi->to", torch.nn.functional.silu(gate) * up, down[experts[:, slot]])
        total = total + weights[:, slot, None].to(x.dtype) * out
    return total


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("normalize", [True, False])
def test_given_experts_that_it_would_choose_change_no_bit(normalize, alignment, generator, device):
    logits = torch.randn(70, EXPERTS, generator=generator).to(device)
    own = moe_routing(logits, USED, normalize=normalize, alignment=alignment)
    given = moe_routing(logits, USED, normalize=normalize, alignment=alignment, experts=own.experts)
    for name in ("experts", "rows", "slots", "offsets"):
        assert_bitwise(getattr(given, name), getattr(own, name))
    for name in ("weights", "probs"):
        if device.type == "cpu":
            assert_bitwise(getattr(given, name), getattr(own, name))
        else:
            assert_sqnr(getattr(given, name), getattr(own, name), 120.0)
    assert given.experts.data_ptr() != own.experts.data_ptr()


@pytest.mark.gpu
def test_given_experts_are_placed_without_waiting_for_the_gpu(generator):
    logits, experts = torch.randn(64, EXPERTS, generator=generator).cuda(), random_choice(64, generator, "cuda")
    expected = moe_routing(logits, USED, normalize=True, alignment=16, experts=experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # any synchronization in here is an error
        captured = moe_routing(logits, USED, normalize=True, alignment=16, experts=experts)
    graph.replay()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, expected, strict=True))


def test_given_experts_are_checked():
    logits = torch.zeros(4, EXPERTS)
    with pytest.raises(DtypeError, match="int64"):
        moe_routing(logits, 2, normalize=True, experts=torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"\(4, 2\)"):
        moe_routing(logits, 2, normalize=True, experts=torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("normalize", [True, False])
def test_replayed_experts_against_plain_torch_and_autograd(normalize, generator, device):
    """Weights and gradients are the router's own, of the experts that the caller chose; two have no token."""
    moe = make(norm_topk_prob=normalize, device=device)
    x, grad = (torch.randn(50, HIDDEN, generator=generator).to(device) for _ in range(2))
    given = random_choice(50, generator, device, unused=(0, 5))
    asked = []

    def replay(own):
        asked.append(own)
        return given

    moe.replay = replay
    ours = gradients(moe, x, moe, grad)
    theirs = gradients(lambda x: plain_given(x, moe, given), x, moe, grad)
    for got, expected in zip(ours, theirs, strict=True):
        assert expected.abs().max() > 0
        assert_sqnr(got, expected, 100.0)
    moe.replay = None
    own = []
    moe.recorder = own.append
    alone = gradients(moe, x, moe, grad)
    assert_bitwise(asked[0], own[0])
    assert not torch.equal(alone[0], ours[0])
    moe.replay = lambda own: own
    assert_all_sqnr(gradients(moe, x, moe, grad), alone, 100.0)


def test_a_replay_reaches_inference_too(generator, device):
    moe = make(torch.bfloat16, device=device)
    nn.convert(moe, "blockwise")
    x = torch.randn(20, HIDDEN, generator=generator).to(device, torch.bfloat16)
    given = random_choice(20, generator, device)
    moe.replay = lambda own: given
    trained = gradients(moe, x, moe, x)[0]
    with torch.no_grad():
        assert moe.experts.can_infer(moe.experts.gate_up_proj.recipe)
        assert_bitwise(moe(x), trained)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_both_losses_join_the_gradient(is_replayed, generator, device):
    moe = make(device=device)
    x, grad = (torch.randn(50, HIDDEN, generator=generator).to(device) for _ in range(2))
    given = random_choice(50, generator, device)
    if is_replayed:
        moe.replay = lambda own: given
    without = gradients(moe, x, moe, grad)
    watch = RouterWatch(moe, aux_loss_coef=0.5, z_loss_coef=0.25, measures=False)
    watch.scale(0.5)
    with_losses = gradients(moe, x, moe, grad)
    weight, own = moe.gate.weight.detach().requires_grad_(), x.detach().requires_grad_()
    logits = own @ weight.t()
    probs = torch.softmax(logits, dim=-1)
    experts = given if is_replayed else probs.topk(USED, dim=-1)[1]
    (0.25 * load_balancing_loss(probs, experts) + 0.125 * router_z_loss(logits)).backward()
    even = torch.full((8, 4), 0.25)
    assert load_balancing_loss(even, torch.arange(8)[:, None] % 4) == 1.0
    assert_bitwise(with_losses[0], without[0])
    assert_sqnr(with_losses[1] - without[1], own.grad, 60.0)
    assert_sqnr(with_losses[2] - without[2], weight.grad, 60.0)


@pytest.mark.slow  # imports transformers
def test_the_load_balancing_loss_is_the_fields(generator):
    """Hugging Face's counts a token once for each of its experts; of one layer it is this one times their number."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(50, EXPERTS, generator=generator)
    probs = torch.softmax(logits, dim=1)
    ours = load_balancing_loss(probs, probs.topk(USED, dim=1).indices)
    theirs = load_balancing_loss_func((logits,), EXPERTS, USED)
    assert float(USED * ours) == pytest.approx(float(theirs), rel=1e-6)


def test_statistics_are_those_of_what_was_trained_on(generator, device):
    moe = make(device=device)
    watch = RouterWatch(moe)
    assert watch.metrics() == {}
    x = torch.randn(50, HIDDEN, generator=generator).to(device)
    with torch.no_grad():
        moe(x)
        assert watch.metrics() == {}  # sampled, not trained
        logits = moe.gate(x)
    probs = torch.softmax(logits, dim=1)
    chosen = probs.topk(USED, dim=1).indices
    loads = torch.stack([(chosen == e).sum() for e in range(EXPERTS)]) / chosen.numel()
    for run in (moe, lambda x: checkpoint(moe, x)):  # a forward that is run again counts once
        gradients(run, x[:20], moe, x[:20])
        gradients(run, x[20:], moe, x[20:])
        found = watch.metrics()
        parts = [(20, probs[:20], chosen[:20]), (30, probs[20:], chosen[20:])]
        balance = sum(n * float(load_balancing_loss(p, c)) for n, p, c in parts) / 50
        assert found["aux_loss"] == pytest.approx(balance, rel=1e-5)
        assert found["z_loss"] == pytest.approx(float(router_z_loss(logits)), rel=1e-4)
        assert found["entropy"] == pytest.approx(float(-(probs * probs.log()).sum(1).mean()), rel=1e-5)
        assert found["load_max_share"] == pytest.approx(float(loads.max()))
        assert found["load_max_over_mean"] == pytest.approx(float(loads.max()) * EXPERTS)
        assert found["load_mean_share"] == pytest.approx(1 / EXPERTS)
        assert found["dropped_share"] == 0.0
        assert watch.metrics() == {}


def test_statistics_see_idle_experts_and_dropped_slots(generator, device):
    moe = make(device=device)
    watch = RouterWatch(moe)
    x = torch.randn(50, HIDDEN, generator=generator).to(device)
    given = random_choice(50, generator, device, unused=(1, 2, 6))
    moe.replay = lambda own: given
    gradients(moe, x, moe, x)
    assert watch.metrics()["idle_experts_share"] == 3 / EXPERTS
    statistics = RouterStatistics()
    routing = moe_routing(torch.randn(50, EXPERTS, generator=generator).to(device), USED, normalize=True)
    slots = routing.slots.clone()
    slots[(slots < 50 * USED).nonzero()[:15, 0]] = 50 * USED  # a routing with a capacity would do that
    statistics.add(routing.probs, routing.experts, slots, routing.probs.amax(dim=1))
    sums = statistics.take()
    assert metrics_of(sums[None])["dropped_share"] == pytest.approx(15 / (50 * USED))
    assert statistics.take() is None


def test_a_dense_model_has_no_router_to_lose_by():
    dense = torch.nn.Sequential(nn.Linear(8, 8))
    assert RouterWatch(dense).metrics() == {}
    assert sparse_blocks(dense) == []
    assert_raises(ConfigError, r"router_aux_loss_coef=0\.1 .* no experts", RouterWatch, dense, aux_loss_coef=0.1)
    assert_raises(ConfigError, r"router_z_loss_coef=0\.2", RouterWatch, dense, z_loss_coef=0.2)
