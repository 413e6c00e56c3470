"""Who exchanges codes in memory and who does not, agreed on by gloo ranks; on two GPUs, that no exchange races."""

import random
import types
from typing import Any

import pytest
import torch

from octavo.distributed import symmetric
from octavo.distributed.symmetric import Workspace, num_bytes_for, slot_blocks, workspace_of
from octavo.distributed.two_shot import all_reduce_q, all_reduce_q_
from octavo.doctor.ranks import _check_symmetric_memory
from octavo.errors import BackendError
from octavo.testing.assertions import assert_bitwise
from tests.assertions import assert_raises
from tests.ranks import on_two_gpus, run_group

CPU = torch.device("cpu")
NUM_ROUNDS = 200


def agreed(rank: int, world: int) -> dict[str, Any]:
    """What this rank finds: over gloo, where one rank fails, where all can, where one has no more memory."""
    found: dict[str, Any] = {"gloo": workspace_of(None, CPU, 1)}
    found["asked again"] = workspace_of(None, CPU, 1)
    symmetric.dist.get_backend_config = lambda _: "cuda:nccl"  # type: ignore[assignment]
    for name, job in (("same job", symmetric.dist.group.WORLD), ("earlier job", None)):
        symmetric._job = (lambda job=job: job) if rank == 0 else None  # type: ignore[misc, assignment]
        found[name] = symmetric.obstacle_to_sharing(symmetric.dist.group.WORLD, CPU)
    symmetric.obstacle_to_sharing = lambda *_: None  # type: ignore[assignment]
    make, buffers = torch.zeros, []

    def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
        buffers.append(num_bytes)
        return make(8)

    def meet(group: Any, buffer: torch.Tensor) -> symmetric.Shared:
        own = [torch.zeros(buffers[-1], dtype=torch.uint8)] * world
        return symmetric.Shared(own, rank, lambda: None)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such memory")

    for name in ("_allocate", "_meet"):
        symmetric._kept.clear()
        symmetric._allocate, symmetric._meet = allocate, meet
        if rank == 1:
            setattr(symmetric, name, fail)
        found[name] = workspace_of(None, CPU, 1)
    symmetric._kept.clear()
    symmetric._meet = meet
    symmetric._allocate = allocate
    first, same = workspace_of(None, CPU, 1000), workspace_of(None, CPU, 1)
    grown = workspace_of(None, CPU, symmetric.MIN_NUMEL + 1)
    symmetric._allocate = fail if rank == 1 else allocate
    largest = workspace_of(None, CPU, symmetric.MAX_NUMEL)
    num = len(buffers)
    again = workspace_of(None, CPU, symmetric.MAX_NUMEL)
    assert isinstance(first, Workspace) and isinstance(grown, Workspace)
    found["kept"] = [first is same, first is grown, grown is largest, grown is again, num == len(buffers)]
    found["grown by"] = grown.num_blocks / first.num_blocks
    assert_raises(BackendError, "not on GPUs", all_reduce_q, torch.ones(3), transport="symmetric")
    assert_bitwise(all_reduce_q(torch.ones(3), transport="nccl"), torch.full((3,), 2.0))
    return found


def test_ranks_agree_on_memory_or_on_why_there_is_none() -> None:
    ranks = run_group(agreed, 2)
    for found in ranks:
        assert found["gloo"] == found["asked again"] == ranks[0]["gloo"]
        assert found["gloo"].startswith("the process group's backend is cpu:gloo") and "not NCCL" in found["gloo"]
        assert found["same job"].startswith("each rank must see all GPUs")
        assert found["earlier job"].startswith("a rank shared memory in an earlier job")
        assert found["_allocate"] == found["_meet"] == "rank 1: RuntimeError: no such memory"
        assert found["kept"] == [True, False, True, True, True]
        assert found["grown by"] == 2


@pytest.mark.parametrize("world", range(2, 9))
def test_a_buffer_holds_what_travels(world: int) -> None:
    for numel in (1, symmetric.MIN_NUMEL, symmetric.MIN_NUMEL + 1, symmetric.MAX_NUMEL, 10 * symmetric.MAX_NUMEL):
        num_bytes = num_bytes_for(numel, world)
        blocks = slot_blocks(num_bytes, world)
        assert blocks * 132 * 2 * world == num_bytes and blocks % 32 == 0
        assert blocks * 128 * world >= min(numel, symmetric.MAX_NUMEL)
        assert num_bytes <= 2.07 * max(2 * min(numel, symmetric.MAX_NUMEL), symmetric.MIN_NUMEL)


def test_the_doctor_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = types.SimpleNamespace(device=CPU)
    monkeypatch.setattr("octavo.doctor.ranks.workspace_of", lambda *_: "the ranks are on several hosts")
    check = _check_symmetric_memory(mesh)
    assert check.status == "note" and check.text.endswith("use NCCL: the ranks are on several hosts")


def raced(rank: int, world: int) -> list[str]:
    """Reductions one after the other, on two streams in turn, beside the same by NCCL: those that differ."""
    device = torch.device("cuda", rank)
    assert isinstance(workspace_of(None, device, 1), Workspace), workspace_of(None, device, 1)
    sizes, streams = random.Random(0), [torch.cuda.Stream(device) for _ in range(2)]
    wrong = []
    for _ in range(10):
        ours, theirs = [], []
        for turn in range(NUM_ROUNDS // 10):
            numel = [1, 777, 128 * world, 300_000, 5_000_000, symmetric.MIN_NUMEL + 12_345][sizes.randrange(6)]
            generator = torch.Generator(device).manual_seed(1000 * turn + rank)
            x = torch.randn(numel, device=device, generator=generator).bfloat16()
            kept = torch.randn(numel, device=device, generator=generator).bfloat16() * 0.01
            theirs.append((x.clone(), kept.clone()))
            ours.append((x.clone(), kept.clone()))
        torch.cuda.synchronize()
        if rank == 1:  # comes late: what another rank does too early is then seen
            torch.cuda._sleep(200_000_000)
        for turn, (x, kept) in enumerate(ours):
            with torch.cuda.stream(streams[turn % 2]):
                all_reduce_q_([x], average=turn % 3 == 0, residuals=[kept], transport="symmetric")
        torch.cuda.synchronize()
        for turn, (x, kept) in enumerate(theirs):
            all_reduce_q_([x], average=turn % 3 == 0, residuals=[kept], transport="nccl")
        for turn, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                wrong.append(f"turn {turn}, {len(found[0])} elements")
    return wrong


@on_two_gpus
def test_no_exchange_in_memory_races() -> None:
    for rank, wrong in enumerate(run_group(raced, 2, "nccl")):
        assert not wrong, f"rank {rank}: {wrong}"
