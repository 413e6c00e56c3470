"""FSDP2 gathers through memory that ranks share: the bits of its own all-gather. Over gloo the memory is a file's."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.distributed.symmetric import Shared
from octavo.distributed.torch_private import gatherer_of, param_groups
from octavo.parallel import copy_engine_gather
from octavo.parallel.copy_engine_gather import CopyEngineAllGather, gather_by_copy_engines
from octavo.parallel.fp8_all_gather import gather_codes
from octavo.testing.assertions import assert_bitwise
from tests.ranks import run_group

STEPS = 2
WIDTHS = [1024, 4096, 8192, 16384]  # of layers that gather 0.5, 2, 4 and 8 MiB
BACKENDS = ["gloo", *([pytest.param("nccl", marks=pytest.mark.gpu)] if torch.cuda.device_count() > 1 else [])]


def share_files(folder: str, rank: int, world: int) -> Any:
    """symmetric.share over files."""
    made = [0]

    def share(_: object, __: object, num_bytes: int) -> Shared:
        made[0] += 1
        dist.barrier()
        buffers = [
            torch.from_file(f"{folder}/{made[0]}-{r}", shared=True, size=num_bytes, dtype=torch.uint8)
            for r in range(world)
        ]
        return Shared(buffers, rank, dist.barrier)

    return share


def train(rank: int, kind: str, shares: bool, device: str) -> tuple[list[torch.Tensor], CopyEngineAllGather | None]:
    """Losses, the last gradients, and what gathered."""
    torch.manual_seed(0)
    widths = WIDTHS if kind == "sizes" else [256] * 4
    layers = [nn.Sequential(nn.Linear(128, width), nn.SiLU(), nn.Linear(width, 128)) for width in widths]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    recipe = octavo.get_recipe("blockwise") if kind == "codes" else None
    for layer in layers:
        if recipe is not None:
            octavo.convert(layer, recipe)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if kind == "codes":
        gather_codes(model, [*layers, model], None)
    if kind == "prefetched":
        for at, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 4])
    if shares:
        assert gather_by_copy_engines(layers) == ""
    comm, _ = gatherer_of(param_groups(layers[0])[0])
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), []
    for step in range(STEPS):
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(10 * step + rank)).to(device, torch.bfloat16)
        if kind == "asynchronous":
            layers[0].unshard(async_op=True)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        if step == STEPS - 1:
            found += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(model(x))
    return found, comm if shares else None


def trained(rank: int, world: int, *, device: str, folder: str) -> dict[str, Any]:
    if device == "cpu":
        for name, fake in {"obstacle_to_sharing": lambda *_: None, "share": share_files(folder, rank, world)}.items():
            setattr(copy_engine_gather, name, fake)
    found = {}
    for kind in ("bf16", "codes", "prefetched", "sizes", "asynchronous"):
        want, _ = train(rank, kind, False, device)
        got, comm = train(rank, kind, True, device)
        for one, other in zip(got, want, strict=True):
            assert_bitwise(one, other)
        assert comm is not None
        found[kind] = [slot.num_bytes >> 20 for slot in comm._slots]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_has_the_bits_of_the_usual_all_gather(backend: str, tmp_path: Path) -> None:
    job = functools.partial(trained, device="cuda" if backend == "nccl" else "cpu", folder=str(tmp_path))
    for found in run_group(job, 2, backend):
        assert found == {
            "bf16": [2] * 2,
            "codes": [2] * 2,
            "prefetched": [2] * 4,
            "sizes": [6, 10],  # MiB, biases included; the first layers' are gone
            "asynchronous": [2] * 2,
        }


def over_pairs(_: int, __: int) -> dict[str, Any]:
    """Backward gathers over other ranks than forward ones; units over other ranks than the first one's."""
    setattr(copy_engine_gather, "obstacle_to_sharing", lambda *_: None)  # noqa: B010
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    layers = [nn.Linear(8, 8) for _ in range(2)]
    for layer, dim in zip(layers, ("a", "b"), strict=True):
        fully_shard(layer, mesh=mesh[dim])
    calls: list[int] = []
    setattr(copy_engine_gather, "all_gather_into", lambda *_, group, async_op: calls.append(group.size()))  # noqa: B010
    comm = CopyEngineAllGather(mesh.get_group("a"), torch.device("cpu"))
    shared = Shared([torch.zeros(32, dtype=torch.uint8)] * 2, 0, lambda: None)
    comm._slots.append(copy_engine_gather._Slot(shared, 32))
    output = comm.allocate((8,), dtype=torch.float32, device=torch.device("cpu"))
    comm(output, output[:4], mesh.get_group("b"))
    comm(output, output[:4], mesh.get_group("a"))
    return {"refused": gather_by_copy_engines(layers), "calls": calls}


def test_other_ranks_go_by_the_process_group() -> None:
    for found in run_group(over_pairs, 4):
        assert found == {"refused": "the units are sharded over several process groups", "calls": [2]}


def without_memory_in(rank: int, world: int, *, after: int, folder: str) -> list[int]:
    """Losses agree where memory cannot be shared, or only `after` buffers; the first are asked for by an evaluation."""
    share, made = share_files(folder, rank, world), [0]

    def fail(*args: Any) -> Any:
        made[0] += 1
        return share(*args) if made[0] <= after else "rank 0: no memory"

    group = dist.group.WORLD
    setattr(copy_engine_gather, "share", fail)  # noqa: B010
    comm = CopyEngineAllGather(group, torch.device("cpu"))
    sums = []
    for is_evaluation in (True, False):
        with torch.inference_mode(is_evaluation):
            output = comm.allocate((2 * world,), dtype=torch.float32, device=torch.device("cpu"))
            piece = output[2 * rank : 2 * rank + 2]
            piece.copy_(torch.tensor([rank, 1.0]))
            comm(output, piece, group)
            sums.append(int(output.sum()))
            del output, piece
    return sums


@pytest.mark.parametrize("after", [0, 9])
def test_an_evaluation_may_gather_first_and_memory_may_end(after: int, tmp_path: Path) -> None:
    for found in run_group(functools.partial(without_memory_in, after=after, folder=str(tmp_path)), 2):
        assert found == [3, 3]


def test_why_not_is_said() -> None:
    assert gather_by_copy_engines([]) == "nothing is gathered"
