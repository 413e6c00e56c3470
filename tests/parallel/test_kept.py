"""Weights that stay whole between optimizer steps, and sums that nothing waits for: fewer gathers, the same bits."""

import contextlib
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import octavo
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.models.export import has_dtensors, reshard
from octavo.nn.weights import shared_scales
from octavo.parallel import gathered, kept, set_last_backward, shard
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


def scales_after_scoring(keeps: bool) -> list[torch.Tensor]:
    """Scales of delayed linears, gathered as codes, whose weights a forward without gradients gathers first."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    model.forward = lambda x: model.layers[1](torch.relu(model.layers[0](x)))
    octavo.convert(model, octavo.get_recipe("delayed", update_every="step"))
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    shard(model, mesh, all_gather_dtype="fp8", param_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    with kept(model) if keeps else contextlib.nullcontext():
        for _ in range(STEPS):
            with torch.no_grad():
                model(x)
            for _ in range(2):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reshard(model)
    found = [buffer.clone() for name, buffer in model.named_buffers() if "scale" in name]
    mesh.close()
    return found


def trained_alone(rank: int) -> bool:
    """A rank alone runs a training forward while the model is whole."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    model.forward = lambda x: model.layers[1](model.layers[0](x))
    octavo.convert(model, octavo.get_recipe("delayed", update_every="step"))
    mesh = Mesh.from_config(ParallelSection(timeout_s=20), "cpu")
    shard(model, mesh, all_gather_dtype="fp8", param_dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    with gathered(model):
        found = model(x).isfinite().all() if rank == 0 else True  # the other rank would not answer a gather
    mesh.close()
    return bool(found)


def test_a_training_forward_of_one_rank_in_gathered_gathers_nothing() -> None:
    assert run_ranks(trained_alone, 2) == [True, True]


def delayed_job(rank: int) -> list[list[list[float]]]:
    return [[scale.tolist() for scale in scales_after_scoring(keeps)] for keeps in (True, False)]


def test_a_forward_without_gradients_hides_no_amax() -> None:
    for kept_scales, usual in run_ranks(delayed_job, 2):
        assert kept_scales == usual and len(usual) == 2
        assert all(scale != 1.0 for scales in usual for scale in scales)


def asked_alone(rank: int) -> list[int]:
    """How often a rank asks for tensorwise scales after a step of the model, and after one of another model's."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    model.forward = lambda x: model.layers[1](model.layers[0](x))
    octavo.convert(model.bfloat16(), "tensorwise")
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    shard(model, mesh, all_gather_dtype="fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    asked: list[int] = []
    reduce = shared_scales.reduce_largest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_scales, "reduce_largest", lambda *args: asked.append(1) or reduce(*args))
        optimizer.step()
        model(x)
        counts = [len(asked)]
        if rank == 0:  # a reward model that this rank alone trains
            other = torch.nn.Parameter(torch.ones(1))
            other.grad = torch.ones(1)
            torch.optim.SGD([other]).step()
            patch.setattr(shared_scales, "reduce_largest", lambda *_: asked.append(1))  # alone it would wait
        model(x)
    mesh.close()
    return [*counts, len(asked)]


def test_another_models_step_on_one_rank_asks_the_others_for_nothing() -> None:
    assert run_ranks(asked_alone, 2) == [[1, 1], [1, 1]]


def sums_of(optimizer: MasterAdamW) -> list[Any]:
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def test_a_step_gathers_once_and_has_the_bits_of_one_process() -> None:
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
