"""FP8 reductions on two ranks over gloo, and with the same bits over NCCL where there are two GPUs."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from octavo.distributed import two_shot
from octavo.distributed.fp8_hook import FP8HookState, fp8_hook
from octavo.distributed.reduction_q import Member, StochasticFP8ReduceScatter
from octavo.distributed.two_shot import all_reduce_q
from octavo.testing.assertions import assert_bitwise
from tests.distributed.two_shots import sum_in_order, two_shots
from tests.ranks import run_group

BACKENDS = ["gloo", *([pytest.param("nccl", marks=pytest.mark.gpu)] if torch.cuda.device_count() > 1 else [])]
STEPS = 4
MEMBERS = (Member(512, 640, True), Member(7, 1, False), Member(6, 100, True))


class Known(nn.Module):
    """Parameters whose gradients are what it is given, in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(256, 512), (512,), (300, 500), (64, 128)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(weight.shape, generator=generator) for weight in Known().weights]


def broken(rank: int) -> torch.Tensor:
    x = torch.randn(2**17 + 5, generator=torch.Generator().manual_seed(rank)).bfloat16()
    x[5000 + rank] = torch.inf if rank else torch.nan
    return x


def reduce_all(rank: int, world: int, *, device: str) -> dict[str, Any]:
    two_shot.MESSAGE_NUMEL = 1 << 16
    residual = torch.zeros(2**17 + 5, dtype=torch.bfloat16, device=device)
    found: dict[str, Any] = {"broken": all_reduce_q(broken(rank).to(device), residual=residual), "kept": residual}
    model = Known().to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.5)
    ddp.register_comm_hook(FP8HookState(ddp, min_bytes=0), fp8_hook)
    found["averages"] = []
    for step in range(STEPS):
        ddp([gradient.to(device) for gradient in gradients(rank, step)]).backward()
        found["averages"].append([weight.grad.clone() for weight in model.weights])
        model.zero_grad()
    values = torch.randn(
        2 * sum(member.shard_numel(2) for member in MEMBERS), generator=torch.Generator().manual_seed(rank)
    )
    reduce_scatter = StochasticFP8ReduceScatter(MEMBERS, "layers.3", seed=5)
    found["scattered"] = torch.empty(len(values) // 2, device=device)
    reduce_scatter(found["scattered"], values.to(device), None, dist.ReduceOp.AVG)
    return torch.utils._pytree.tree_map(lambda x: x.cpu(), found)


@functools.cache
def results(backend: str) -> list[dict[str, Any]]:
    device = "cuda" if backend == "nccl" else "cpu"
    return run_group(functools.partial(reduce_all, device=device), 2, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ddp_averages_in_the_bits_of_two_shots(backend: str) -> None:
    """Of the first step, without residuals; the vector is averaged in fp32."""
    for found in results(backend):
        for index, average in enumerate(found["averages"][0]):
            given = [gradients(rank, 0)[index] for rank in range(2)]
            assert_bitwise(average, sum_in_order(given) / 2 if index == 1 else two_shots(given, average=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_bit_is_gloos(backend: str) -> None:
    """Averages of four steps with residuals, stochastic sums, residuals, and where NaN is."""
    for rank, found in enumerate(results(backend)):
        wanted = results("gloo")[0]
        for step, averages in enumerate(found["averages"]):
            for ours, theirs in zip(averages, wanted["averages"][step], strict=True):
                assert_bitwise(ours, theirs)
        assert_bitwise(found["scattered"], results("gloo")[rank]["scattered"])
        assert_bitwise(found["kept"], results("gloo")[rank]["kept"])
        is_nan = found["broken"].isnan()
        assert torch.equal(is_nan.nonzero().flatten(), torch.arange(4992, 5120))
        assert_bitwise(found["broken"][~is_nan], wanted["broken"][~is_nan])
