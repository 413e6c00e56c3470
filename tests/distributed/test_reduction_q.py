"""FSDP2's gradients in FP8 on 2 and 4 gloo ranks: unbiased, repeatable, the same codes on every layout, NaN."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo.distributed.reduction_q import Member, StochasticFP8ReduceScatter
from octavo.errors import ConfigError, ShapeError
from octavo.parallel.fp8_reduce_scatter import use_fp8_reduce_scatter
from octavo.testing.assertions import assert_bitwise, assert_sqnr
from octavo.testing.tolerances import STOCHASTIC_DB
from tests.assertions import assert_raises
from tests.distributed.two_shots import sum_in_order
from tests.ranks import run_group

WORLDS = (2, 4)
MEMBERS = (Member(5, 1, False), Member(8, 256, True), Member(3, 7, False), Member(6, 100, True))  # 5, 3, 6: uneven
NUM_SEEDS = 64
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def whole(rank: int) -> list[torch.Tensor]:
    """A rank's gradients, whole."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(member.rows, member.row_numel, generator=generator) for member in MEMBERS]


def shards(gradients: list[torch.Tensor], world: int) -> torch.Tensor:
    """The buffer that FSDP2 makes of them: every rank's rows of each, padded with zeros."""
    rows = [nn.functional.pad(x, (0, 0, 0, -len(x) % world)).view(world, -1) for x in gradients]
    return torch.cat(rows, dim=1).view(-1)


def reduced(values: torch.Tensor, op: Any = SUM, group: Any = None, *, calls: int = 0, seed: int = 0) -> torch.Tensor:
    reduce_scatter = StochasticFP8ReduceScatter(MEMBERS, "layers.0", seed)
    reduce_scatter.num_calls = calls
    output = reduce_scatter.allocate(
        (values.numel() // dist.get_world_size(group),), dtype=values.dtype, device=values.device
    )
    reduce_scatter(output, values, group, op)
    assert reduce_scatter.num_calls == calls + 1
    return output


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Embedding(16, 128), nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    )
    octavo.convert(made, "blockwise")
    return made


def backward(made: nn.Module, rank: int) -> None:
    ids = torch.randint(0, 16, (64,), generator=torch.Generator().manual_seed(rank))
    made(ids).square().mean().backward()


def fsdp(rank: int, world: int) -> dict[str, Any]:
    """Gradients of a sharded model beside the mean of the ranks' own, and of the same call again."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {"gradients": []}
    for _ in range(2):
        made = model()
        fully_shard(made[1])
        fully_shard(made)
        found["set"] = list(use_fp8_reduce_scatter(made, min_bytes=1 << 10))
        backward(made, rank)
        found["gradients"].append({name: p.grad.full_tensor() for name, p in made.named_parameters()})
    assert_raises(ConfigError, "no group under fully_shard has", use_fp8_reduce_scatter, made)
    assert_raises(ConfigError, "apply fully_shard first", use_fp8_reduce_scatter, model(), min_bytes=0)
    found["own"] = []
    for other in range(world):
        backward(made := model(), other)
        found["own"].append({name: p.grad for name, p in made.named_parameters()})
    return found


def runs(rank: int, world: int) -> dict[str, Any]:
    mine = shards(whole(rank), world)
    found: dict[str, Any] = {"sum": reduced(mine), "average": reduced(mine, AVG), "again": reduced(mine)}
    found["alike"] = reduced(shards(whole(0), world))
    found["bf16"] = reduced(mine.bfloat16())
    found["next"] = reduced(mine, calls=1)
    found["seeds"] = torch.stack([reduced(mine, seed=seed) for seed in range(NUM_SEEDS)])
    bad = [x.clone() for x in whole(rank)]
    bad[1][0, 5] = torch.inf if rank == 0 else bad[1][0, 5]
    found["broken"] = reduced(shards(bad, world))
    # what each rank alone sends, over all ranks and over pairs that share the shards
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    for name, group, size in (("alone", None, world), ("alone in pairs", pairs[rank // 2], 2)):
        found[name] = []
        for sender in range(world):
            gradients = whole(rank) if rank == sender else [torch.zeros(m.rows, m.row_numel) for m in MEMBERS]
            found[name].append(reduced(shards(gradients, size), group=group))
    short = StochasticFP8ReduceScatter(MEMBERS[:2], "layers.0")
    assert_raises(ShapeError, "gradients of group 'layers.0' must have", short, mine, mine, None, SUM)
    full = StochasticFP8ReduceScatter(MEMBERS, "layers.0")
    assert_raises(ConfigError, "set_force_sum_reduction", full, mine, mine, None, dist.ReduceOp.MAX)
    found["fsdp"] = fsdp(rank, world)
    return found


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_group(runs, request.param)


def matrices(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x, member in zip(gradients, MEMBERS, strict=True) if member.is_fp8]


def unsharded(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Whole gradients of every rank's shards."""
    sizes = [member.shard_numel(len(outputs)) for member in MEMBERS]
    parts = [torch.cat(shard) for shard in zip(*(output.split(sizes) for output in outputs), strict=True)]
    return [x[: m.rows * m.row_numel].view(m.rows, m.row_numel) for x, m in zip(parts, MEMBERS, strict=True)]


def test_the_rest_is_summed_in_fp32_in_the_order_of_the_ranks(ranks: list[dict[str, Any]]) -> None:
    found = unsharded([found["sum"] for found in ranks])
    for index, member in enumerate(MEMBERS):
        exact = sum_in_order([whole(rank)[index] for rank in range(len(ranks))])
        if member.is_fp8:
            assert_sqnr(found[index], exact, STOCHASTIC_DB)
        else:
            assert_bitwise(found[index], exact)


def test_a_matrix_is_the_sum_in_order_of_what_each_rank_sent(ranks: list[dict[str, Any]]) -> None:
    alone = [unsharded([found["alone"][sender] for found in ranks]) for sender in range(len(ranks))]
    for ours, *sent in zip(unsharded([found["sum"] for found in ranks]), *alone, strict=True):
        assert_bitwise(ours, sum_in_order(sent))


def test_what_a_rank_sends_does_not_depend_on_the_layout(ranks: list[dict[str, Any]]) -> None:
    """Of the matrix with whole blocks in every shard: the same codes where pairs share the shards."""
    for sender in range(len(ranks)):
        everywhere = unsharded([found["alone"][sender] for found in ranks])
        first = sender // 2 * 2
        in_pairs = unsharded([found["alone in pairs"][sender] for found in ranks[first : first + 2]])
        assert_bitwise(in_pairs[1], everywhere[1])


def test_a_call_repeats_itself_and_the_next_is_another(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_bitwise(found["again"], found["sum"])
        assert_bitwise(found["average"], found["sum"] / len(ranks))
        assert (found["next"] != found["sum"]).float().mean() > 0.5
        assert found["bf16"].dtype == torch.bfloat16


def test_the_mean_over_seeds_is_the_exact_sum(ranks: list[dict[str, Any]]) -> None:
    """Errors of 64 seeds are independent: their mean is 8 times smaller than one; of the sum of the ranks, too."""
    world = len(ranks)
    sent = [whole(sender) for sender in range(world)]
    exact = shards([sum_in_order(list(parts)) for parts in zip(*sent, strict=True)], world).view(world, -1)
    errors = torch.cat([found["seeds"] - mine for found, mine in zip(ranks, exact, strict=True)], dim=1)
    one, mean = errors.square().mean().sqrt(), errors.mean(dim=0).square().mean().sqrt()
    assert 0.9 < mean / one * NUM_SEEDS**0.5 < 1.1
    alone = [
        torch.cat([found["alone"][sender] for found in ranks]) - shards(sent[sender], world) for sender in range(world)
    ]
    single = torch.stack(alone).square().mean().sqrt()
    assert 0.9 < one / (single * world**0.5) < 1.1


def test_ranks_with_the_same_gradient_round_it_apart(ranks: list[dict[str, Any]]) -> None:
    """So the error of their sum is that of independent ones; were it the same on each, it would be sqrt(ranks) more."""
    world, exact = len(ranks), matrices(whole(0))
    alike = matrices(unsharded([found["alike"] for found in ranks]))
    alone = matrices(unsharded([found["alone"][0] for found in ranks]))
    for ours, one, true in zip(alike, alone, exact, strict=True):
        growth = (ours - world * true).norm() / (one - true).norm()
        assert 0.85 < growth / world**0.5 < 1.15


def test_a_block_with_an_infinity_is_nan(ranks: list[dict[str, Any]]) -> None:
    matrix = unsharded([found["broken"] for found in ranks])[1]
    expected = torch.zeros(8, 256, dtype=torch.bool)
    expected[0, :128] = True
    assert torch.equal(matrix.isnan(), expected)


def test_a_sharded_model_trains_with_it(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        first, again = found["fsdp"]["gradients"]
        assert found["fsdp"]["set"] == ["1"]  # the root has the embedding alone
        for name, gradient in first.items():
            assert_bitwise(gradient, again[name], name)
            exact = sum_in_order([own[name] for own in found["fsdp"]["own"]]) / len(ranks)
            if name in ("1.1.weight", "1.3.weight"):
                assert_sqnr(gradient, exact, STOCHASTIC_DB, name)
                assert not torch.equal(gradient, exact)
            else:
                torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=1e-8)
