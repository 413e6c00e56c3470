"""Weights that stay whole between optimizer steps, and sums that nothing waits for: fewer gathers, the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.models.export import has_dtensors, reshard
from octavo.parallel import kept, set_last_backward, shard
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from tests.parallel.test_shard import MICRO_BATCHES, loss_of, make, train, whole
from tests.ranks import run_ranks

STEPS = 3


def job(rank: int) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    expected = train(make("blockwise"), range(MICRO_BATCHES))
    model = make("blockwise", torch.float32)
    num_units = len(shard(model, mesh, reduction="ordered", param_dtype=torch.bfloat16).units)
    optimizer = MasterAdamW(model, OptimizerSection(lr=0.01))
    places: list[list[list[int]]] = [[] for _ in range(STEPS)]
    gathers, share = [], mesh.own_share(MICRO_BATCHES)
    gather = _fsdp_param_group.foreach_all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_all_gather", lambda *args: gathers.append(args) or gather(*args))
        with kept(model):
            for step in range(STEPS):
                with torch.no_grad():
                    loss_of(model, step, share[0])
                for index in share:
                    set_last_backward(model, index == share[-1])
                    loss_of(model, step, index).backward()
                    places[step].append([grad.to_local().data_ptr() for grad in sums_of(optimizer)])
                optimizer.step()
                reshard(model)
            num_kept = len(gathers)
            loss_of(model, 0, 0)
            is_whole = not has_dtensors(model)
        is_cut = all(hasattr(param, "placements") for param in model.parameters())
        gathers.clear()
        loss_of(model, 0, 0).backward()
    masters = optimizer._update._masters  # type: ignore[union-attr]
    return {
        "gathers": [num_kept, STEPS * num_units],
        "again": [len(gathers), 2 * num_units - 1],  # a layer for its forward and its backward, the rest once
        "same": all(torch.equal(whole(masters[name]), value) for name, value in expected["masters"].items()),
        "state": [is_whole, is_cut],
        "in_place": [all(place == of_step[0] for place in of_step) for of_step in places],
    }


def sums_of(optimizer: MasterAdamW) -> list[Any]:
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def test_a_step_gathers_once_and_has_the_bits_of_one_process(tmp_path: Path) -> None:
    for found in run_ranks(job, 2):
        assert found["gathers"][0] == found["gathers"][1] and found["again"][0] == found["again"][1]
        assert found["same"] and found["state"] == [True, True]
        assert found["in_place"] == [True] * STEPS


def test_a_whole_model_is_left_alone() -> None:
    model = make("blockwise")
    with kept(model):
        set_last_backward(model, False)
        loss_of(model, 0, 0).backward()
    assert all(param.grad is not None for param in model.parameters())
