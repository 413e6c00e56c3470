"""Rows of DTensors on 2 ranks: where they begin, whole again in every bit, and an update on them; plain tensors too."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.distributed.norm import global_norm
from octavo.distributed.shards import cut, fill, global_offset, local, rows_of, whole
from octavo.optim import AdamW
from tests.ranks import run_ranks

SHAPES = [(9, 128), (7, 12), (256,), (1, 6)]


def tensors(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    found[0][0, 0], found[0][-1, -1] = -0.0, torch.inf
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def updates(distribute: Any) -> list[bool]:
    """Of AdamW with 8-bit state, whose blocks some of the cuts go through: weights, moments and the norm."""
    results = []
    for place in (lambda tensor: tensor, distribute):
        params = [torch.nn.Parameter(place(tensor.nan_to_num(posinf=1.0))) for tensor in tensors(torch.bfloat16)]
        optimizer = AdamW(params, lr=0.1, state_dtype="fp8", master_weights="remainder")
        for step in range(3):
            for param, grad in zip(params, tensors(torch.float32, step), strict=True):
                param.grad = place(grad.nan_to_num(posinf=1.0).bfloat16())
            norm = global_norm([param.grad for param in params])
            optimizer.step(grad_scale=1.0 / norm)
        states = [optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq_scale", "remainder")]
        results.append([norm, *params, *states])
    return [same(local(b), cut(a.detach(), b)) for a, b in zip(*results, strict=True)]


def job(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    distribute = functools.partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)], src_data_rank=None)
    found: dict[str, Any] = {"rows": [], "whole": [], "filled": []}
    for dtype in (torch.float32, torch.bfloat16):
        plain = tensors(dtype)
        sharded = [distribute(tensor) for tensor in plain]
        found["rows"] = [[*rows_of(tensor)[:2], global_offset(tensor)] for tensor in sharded]
        parts = [local(tensor) for tensor in sharded] + [plain[0]]
        found["whole"] += [
            same(a, b) for a, b in zip(whole(parts, [*sharded, plain[0]]), [*plain, plain[0]], strict=True)
        ]
        for target, source, saved in zip(sharded, tensors(dtype, 1), (False, True, False, True), strict=True):
            fill(target, distribute(source) if saved else source)
            found["filled"].append(same(local(target), cut(source, target)))
    found["updates"] = updates(distribute)
    dist.barrier()  # who leaves first can take the other's threads down
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(job, 2)


def test_rows_are_torch_chunks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["rows"] == [[0, 5, 0], [0, 4, 0], [0, 128, 0], [0, 1, 0]]
    assert ranks[1]["rows"] == [[5, 4, 640], [4, 3, 48], [128, 128, 128], [1, 0, 6]]


def test_whole_tensors_have_every_bit(ranks: list[dict[str, Any]]) -> None:
    assert [found["whole"] for found in ranks] == [[True] * 10] * 2


def test_saved_tensors_are_taken_whole_or_cut(ranks: list[dict[str, Any]]) -> None:
    assert [found["filled"] for found in ranks] == [[True] * 8] * 2


def test_an_update_has_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    assert [found["updates"] for found in ranks] == [[True] * (1 + 4 * len(SHAPES))] * 2


def test_plain_tensors_are_whole() -> None:
    tensor = torch.ones(3, 4)
    assert rows_of(tensor) == (0, 3, ()) and global_offset(tensor) == 0
    assert local(tensor) is tensor and whole([tensor], [tensor])[0] is tensor
    fill(tensor, torch.zeros(3, 4))
    assert tensor.sum() == 0
