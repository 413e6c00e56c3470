"""Each private name of torch.distributed is there in this torch, and says what octavo takes it to say."""

import inspect
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.distributed import torch_private
from tests.ranks import run_group


def job(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    fully_shard(model)
    (group,) = torch_private.param_groups(model)
    held = list(model.parameters())
    found: dict[str, Any] = {"begun": [torch_private.has_begun(group)], "has_fsdp": torch_private.has_fsdp()}
    found["whole"] = [torch_private.is_unsharded(model)]
    for rule in (True, False):
        model.set_reshard_after_forward(rule)
        with torch.no_grad():
            model(torch.ones(2, 6))
        found["whole"].append(torch_private.is_unsharded(model))
        model.reshard()
    restore = torch_private.keep_reshard_rule(model)
    model.set_reshard_after_forward(True)
    restore()
    with torch.no_grad():
        model(torch.ones(2, 6))
    found["whole"].append(torch_private.is_unsharded(model))
    found["held"] = [p is q for p, q in zip(torch_private.sharded_parameters(model), held, strict=True)]
    model.reshard()
    model(torch.ones(2, 6)).sum().backward()
    found["begun"].append(torch_private.has_begun(group))
    found["params"] = [(torch_private.name_of(p), torch_private.padded_numel(p)) for p in group.fsdp_params]
    reducer, num_ranks = torch_private.reducer_of(group)
    model.set_custom_reduce_scatter(own := Reducer())
    found["reducer"] = [callable(reducer), num_ranks, torch_private.reducer_of(group)[0] is own]
    gatherer, ranks_of_it = torch_private.gatherer_of(group)
    torch_private.set_gatherer(group, own)
    found["gatherer"] = [callable(gatherer), ranks_of_it.size(), torch_private.gatherer_of(group)[0] is own]
    torch_private.default_store().set(f"here/{rank}", "1")
    torch_private.set_timeout(timedelta(seconds=7), dist.group.WORLD)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    found["timeout"] = backend.options._timeout
    dist.barrier()
    found["store"] = torch_private.default_store().check([f"here/{other}" for other in range(world)])
    return found


class Reducer:
    """One of a caller's own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *_: Any, **__: Any) -> None: ...


def test_each_name_says_what_it_is_taken_to_say() -> None:
    for found in run_group(job, 2):
        assert found["begun"] == [False, True] and found["has_fsdp"] and found["held"] == [True] * 4
        assert found["whole"] == [False, False, True, True]
        # of 5 rows each of two ranks has three, one of them padding
        assert found["params"] == [("0.weight", 18), ("0.bias", 3), ("1.weight", 10), ("1.bias", 2)]
        assert found["reducer"] == [True, 2, True] == found["gatherer"]
        assert found["store"] and found["timeout"] == timedelta(seconds=7)


def test_after_a_failed_start_groups_are_counted_from_0_again() -> None:
    alone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(dist.DistError):
        dist.init_process_group("gloo", store=alone, rank=0, world_size=2, timeout=timedelta(seconds=1))
    names = dist.distributed_c10d._world
    assert names.group_count == 1 and not dist.is_initialized()
    torch_private.forget_group_names()
    assert names.group_count == 0


def test_no_mode_sees_what_is_done_outside() -> None:
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError(f"{func} was seen")

    with Refusing():
        with pytest.raises(RuntimeError, match="was seen"):
            torch.zeros(1)
        with torch_private.outside_modes():
            assert torch.zeros(1).item() == 0


def test_no_function_is_left_out() -> None:
    names = {name for name, _ in inspect.getmembers(torch_private, inspect.isfunction)}
    asked = Path(__file__).read_text(encoding="utf-8")
    assert {name for name in names if f"torch_private.{name}(" not in asked} == set()


def test_without_fsdp_nothing_is_loaded() -> None:
    code = "import octavo.nn, octavo.distributed.torch_private as private, sys; sys.exit(private.has_fsdp())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
