"""The router's kernels against the reference: parts, their routing, bits of a token alone."""

import pytest
import torch

from octavo.ops.moe import Routing, moe_routing, router
from octavo.ops.moe import triton as routing_kernels
from octavo.ops.moe.reference import moe_routing_reference
from octavo.ops.moe.router import triton as kernels
from octavo.ops.moe.router.reference import NUM_PARTS, route_tokens_reference, router_parts_reference
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_all_bitwise

DEVICE = "cpu" if is_interpreting() else "cuda"
# tokens, experts, K: K of whole ranges, of a last one that is shorter, of fewer ranges than parts, of no whole words
SIZES = [(1, 8, 2048), (7, 60, 2048), (64, 128, 2048), (200, 60, 2000), (33, 5, 40), (32, 8, 131), (9, 200, 2112)]
SIZES += [(512, 128, 2048), (20, 128, 4096), (3, 1, 8)]
if not is_interpreting():
    SIZES += [(t, e, 2048) for t in (1, 31, 32, 33, 256, 512) for e in (8, 60, 128, 256)] + [(512, 256, 7168)]


def operands(T: int, E: int, K: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of 1, and a weight whose logits are some."""
    generator = torch.Generator().manual_seed(T + E + K)
    x, weight = torch.randn(T, K, generator=generator), torch.randn(E, K, generator=generator) * 3 * K**-0.5
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def route(x: torch.Tensor, weight: torch.Tensor, top_k: int, alignment: int = 1) -> Routing:
    parts = kernels.router_parts(x, weight, True)
    return Routing(*routing_kernels.moe_routing(parts, top_k, True, alignment))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(("tokens", "experts", "K"), SIZES)
def test_each_part_is_its_range_of_the_product(tokens: int, experts: int, K: int) -> None:
    x, weight = operands(tokens, experts, K)
    assert kernels.can_run(x, weight)
    expected = router_parts_reference(x, weight)
    for reads_ahead in (False, True):
        found = kernels.router_parts(x, weight, reads_ahead)
        for part, wanted in zip(found, expected, strict=True):
            if wanted.any():
                assert_sqnr(part, wanted, 90.0)  # as of the exact product in fp32
            else:
                assert not part.any()  # no range is left, or none of the tokens' values


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (7, 60, 6), (200, 60, 8), (512, 128, 8)])
def test_parts_are_routed_as_their_sum(tokens: int, experts: int, top_k: int, alignment: int) -> None:
    """Bitwise, with parts of such sizes that another order of the sum has other bits."""
    generator = torch.Generator().manual_seed(tokens)
    parts = 3 * torch.randn(NUM_PARTS, tokens, experts, generator=generator)
    parts[1], parts[6] = 1000 + parts[1], parts[6] - 1000
    parts = parts.to(DEVICE)
    found = routing_kernels.moe_routing(parts, top_k, True, alignment)
    assert_all_bitwise(found, moe_routing_reference(parts, top_k, True, alignment))


def test_parts_of_many_tokens_and_of_other_strides() -> None:
    parts = torch.randn(3, 530, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert_all_bitwise(routing_kernels.moe_routing(parts, 2, True, 16), moe_routing_reference(parts, 2, True, 16))
    for own in (parts[:, :9], parts[:, :9].transpose(1, 2).contiguous().transpose(1, 2)):
        assert_all_bitwise(routing_kernels.moe_routing(own, 2, True, 1), moe_routing_reference(own, 2, True, 1))


@pytest.mark.parametrize(("tokens", "experts", "K", "top_k"), [(7, 60, 2048, 6), (64, 128, 2048, 8), (200, 8, 200, 2)])
def test_tokens_go_where_the_reference_sends_them(tokens: int, experts: int, K: int, top_k: int) -> None:
    """But where two experts are as likely to the last bits."""
    x, weight = operands(tokens, experts, K)
    found, expected = route(x, weight, top_k), Routing(*route_tokens_reference(x, weight, top_k, True, 1))
    assert_sqnr(found.probs, expected.probs, 90.0)
    is_other = found.experts != expected.experts
    gap = found.probs.gather(1, found.experts) - found.probs.gather(1, expected.experts)
    assert gap[is_other].abs().lt(1e-6).all() and is_other.float().mean() < 0.01
    assert_sqnr(found.weights, expected.weights, 90.0)


def test_a_token_does_not_see_its_neighbours() -> None:
    x, weight = operands(90, 60, 2048)
    whole = kernels.router_parts(x, weight, False)
    for rows in ([0], [89], [3, 80], list(range(33)), list(range(89, -1, -3))):
        assert_bitwise(kernels.router_parts(x[rows], weight, False), whole[:, rows])
    wide = torch.cat((x, x), dim=1)[:, :2048]
    assert_bitwise(kernels.router_parts(wide, weight, False), whole)
    assert_bitwise(kernels.router_parts(x, torch.cat((weight, weight), dim=1)[:, :2048], True), whole)


def test_values_that_are_not_finite_stay_in_their_rows() -> None:
    x, weight = operands(40, 8, 256)
    whole = kernels.router_parts(x, weight, False)
    x[3, 100], weight[5, 7] = torch.inf, torch.nan
    found = kernels.router_parts(x, weight, False)
    assert found[0, :, 5].isnan().all() and found[3, 3, :5].isinf().all()  # columns 96 to 127 are the fourth part's
    found[0, :, 5], found[3, 3] = whole[0, :, 5], whole[3, 3]
    assert_bitwise(found, whole)


def test_what_it_takes() -> None:
    x, weight = operands(512, 256, 64)
    assert kernels.can_run(x, weight) and kernels.can_run(x.half(), weight.half())
    assert not kernels.can_run(torch.cat((x, x[:1])), weight)
    assert not kernels.can_run(x, torch.cat((weight, weight[:1])))
    assert not kernels.can_run(x[:0], weight)
    assert not kernels.can_run(x, weight.float()) and not kernels.can_run(x.float(), weight.float())
    assert not kernels.can_run(x.t().contiguous().t(), weight)
    assert not kernels.can_run(x, weight.t().contiguous().t())


@pytest.mark.gpu
def test_the_op_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("on Hopper alone")
    x, weight = operands(64, 128, 2048)
    with torch.no_grad():
        assert router.takes_tokens(x, weight)
        found = router.route_tokens(x, weight, 8, normalize=True, reads_ahead=True)
        assert_all_bitwise(found, route(x, weight, 8))
        logits = router.router_logits(x, weight)
        assert_all_bitwise(found, moe_routing(logits, 8, normalize=True))
        assert not router.takes_tokens(torch.cat([x] * 9), weight)
        monkeypatch.setenv("OCTAVO_FORCE_REFERENCE", "1")
        assert not router.takes_tokens(x, weight)
        assert_sqnr(router.router_logits(x, weight), logits, 90.0)


@pytest.mark.gpu
def test_a_graph_repeats_the_bits() -> None:
    """The chain begins early behind a kernel that makes x, at every replay."""
    x, weight = operands(512, 128, 2048)
    source = x.clone()
    with torch.no_grad():
        expected = router.route_tokens(x, weight, 8, normalize=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                x.copy_(source)
                captured = router.route_tokens(x, weight, 8, normalize=True, reads_ahead=True)
        for _ in range(20):
            x.zero_()
            graph.replay()
            assert_all_bitwise(captured, expected)
