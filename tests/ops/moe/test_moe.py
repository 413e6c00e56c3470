"""Routing: the chosen experts, ties, padding, and the batch sorted by expert and back."""

import pytest
import torch

from octavo.errors import ConfigError, ShapeError
from octavo.ops.moe import combine_rows, dispatch_rows, moe_routing, num_rows
from octavo.testing import assert_bitwise
from tests.assertions import assert_raises

SIZES = [(1, 8, 2), (37, 8, 3), (64, 128, 8), (5, 4, 4), (0, 8, 2)]


def some_logits(num_tokens, num_experts, generator, device="cpu"):
    return (3 * torch.randn(num_tokens, num_experts, generator=generator)).to(device)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_likeliest_are_chosen(tokens, experts, top_k, normalize, generator, device):
    logits = some_logits(tokens, experts, generator, device)
    routing = moe_routing(logits, top_k, normalize=normalize)
    probs = torch.softmax(logits.double(), dim=-1)
    expected, chosen = probs.topk(top_k, dim=-1)
    if normalize:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    assert torch.equal(routing.experts, chosen)
    torch.testing.assert_close(routing.weights.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(routing.probs.double(), probs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
def test_every_slot_has_one_row_in_its_experts_group(tokens, experts, top_k, alignment, generator, device):
    routing = moe_routing(some_logits(tokens, experts, generator, device), top_k, normalize=True, alignment=alignment)
    assert routing.slots.shape == (num_rows(tokens * top_k, experts, alignment),)
    assert routing.offsets.dtype == torch.int32
    assert not (routing.offsets % alignment).any()
    real = routing.slots < tokens * top_k
    assert sorted(routing.slots[real].tolist()) == list(range(tokens * top_k))
    assert (routing.slots[~real] == tokens * top_k).all()
    flat = routing.experts.flatten()
    start = 0
    for expert, end in enumerate(routing.offsets.tolist()):
        here = routing.slots[start:end]
        here = here[here < tokens * top_k]
        assert here.tolist() == (flat == expert).nonzero().flatten().tolist()  # in the tokens' order
        assert end - start == -(-len(here) // alignment) * alignment
        start = end
    assert start <= routing.slots.shape[0]
    assert torch.equal(routing.slots[routing.rows.flatten()], torch.arange(tokens * top_k, device=device))


def test_of_equal_ones_the_lowest_experts_are_chosen(device):
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [5.0, 1.0, 1.0, 0.0]], device=device)
    routing = moe_routing(logits, 2, normalize=True)
    assert routing.experts.tolist() == [[1, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize("num_experts", [8, 60, 128])
def test_a_token_does_not_see_its_neighbours(num_experts, generator, device):
    logits = some_logits(130, num_experts, generator, device)
    whole = moe_routing(logits, 6, normalize=True, alignment=16)
    for rows in ([0], [129], [3, 80], list(range(64)), list(range(129, -1, -3))):
        part = moe_routing(logits[rows], 6, normalize=True)
        assert_bitwise(part.weights, whole.weights[rows])
        assert_bitwise(part.experts, whole.experts[rows])
    strided = logits.t().contiguous().t()
    assert_bitwise(moe_routing(strided, 6, normalize=True).weights, whole.weights)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_dispatch_and_combine_against_a_loop(alignment, dtype, generator, device):
    x = torch.randn(21, 40, generator=generator).to(device, dtype)
    routing = moe_routing(some_logits(21, 8, generator, device), 3, normalize=False, alignment=alignment)
    rows = dispatch_rows(x, routing)
    assert not rows[routing.slots == 63].any()
    for token in range(21):
        total = torch.zeros(40, device=device)
        for slot in range(3):
            row = rows[routing.rows[token, slot]]
            assert_bitwise(row, x[token])
            total = total + row.float() * routing.weights[token, slot]
        assert_bitwise(combine_rows(rows, routing)[token], total.to(dtype))
    assert_bitwise(combine_rows(rows, routing, weighted=False), (x.float() + x.float() + x.float()).to(dtype))


def test_bad_arguments_are_refused():
    logits = torch.zeros(4, 8)
    assert_raises(ConfigError, "top_k", moe_routing, logits, 9, normalize=True)
    assert_raises(ConfigError, "alignment", moe_routing, logits, 2, normalize=True, alignment=0)
    assert_raises(ShapeError, "matrix", moe_routing, logits[0], 2, normalize=True)
    routing = moe_routing(logits, 2, normalize=True)
    assert_raises(ShapeError, "T=4", dispatch_rows, torch.zeros(3, 5), routing)
    assert_raises(ShapeError, "R=8", combine_rows, torch.zeros(3, 5), routing)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(generator, device):
    logits = some_logits(64, 16, generator, device)
    x = torch.randn(64, 32, device=device)
    routing = moe_routing(logits, 2, normalize=True, alignment=16)
    expected = combine_rows(dispatch_rows(x, routing), routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # any synchronization in here is an error
        captured = moe_routing(logits, 2, normalize=True, alignment=16)
        out = combine_rows(dispatch_rows(x, captured), captured)
    graph.replay()
    assert_bitwise(out, expected)
