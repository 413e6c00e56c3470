"""Optimizers on 2 ranks, 4 ranks and HSDP 2 x 2: the bits of one process, and state that any layout can load."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from octavo.distributed.norm import global_norm
from octavo.distributed.shards import local
from octavo.errors import CheckpointError, ShapeError
from octavo.optim import AdamW
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from tests.ranks import run_group, run_ranks

pytestmark = pytest.mark.slow
WORLD = 4
# Rows that 4 ranks do not divide, rows that end with a block of 128 and rows that do not, a rank without any row.
SHAPES = {"even": (16, 256), "uneven": (10, 384), "odd": (7, 12), "blocks": (512,), "cut": (300,), "few": (3,), "experts": (5, 4, 32)}  # fmt: skip # noqa: E501
PAIRS = [*itertools.product(("fp32", "bf16", "fp8"), ("fp32", "remainder", "none"))]
# each kind of state and of master weights once; make test-largest has the others
MODES = [
    *((torch.bfloat16, *pair) for pair in (PAIRS[0], PAIRS[5], PAIRS[7])),
    *itertools.product([torch.float32], ("fp32", "fp8"), ("fp32",)),
]
OTHER_MODES = [mode for pair in PAIRS if (mode := (torch.bfloat16, *pair)) not in MODES]
LAYOUTS = ("two", "four", "hybrid")
Results = dict[str, Any]


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: (torch.randn(shape, generator=generator) * 3.0 ** (step % 3)).to(dtype) for name, shape in SHAPES.items()
    }


@functools.cache
def meshes() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {"one": None, "two": grid["shard"], "four": init_device_mesh("cpu", (4,)), "hybrid": grid}


def make(layout: str, dtype: torch.dtype, seed: int = 0) -> Weights:
    model, mesh = Weights(dtype, seed), meshes()[layout]
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    return model


def give(model: nn.Module, step: int) -> None:
    """The same whole gradients on every layout."""
    for name, param in model.named_parameters():
        grad = gradients(step, param.dtype)[name]
        if hasattr(param, "placements"):
            from torch.distributed.tensor import distribute_tensor

            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def update(model: nn.Module, optimizer: MasterAdamW, first: int = 0, num_steps: int = 3) -> list[torch.Tensor]:
    """Steps of two micro-batches each; returns the norms."""
    norms = []
    for step in range(first, first + num_steps):
        give(model, 2 * step)
        if next(model.parameters()).dtype != torch.float32:  # those accumulate in place
            optimizer.accumulate_gradients()
            give(model, 2 * step + 1)
        optimizer.accumulate_gradients()
        norms.append(optimizer.clip_gradients(40.0))
        optimizer.step(lr=1e-2)
    return norms


def bits(tensor: torch.Tensor) -> bytes:
    """Of the whole tensor, put together by torch."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import DTensor

        part = local(tensor)
        as_bytes = part.reshape(*part.shape, 1).view(torch.uint8)
        shape = torch.Size((*tensor.shape, tensor.element_size()))
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = tensor.device_mesh, tensor.placements
        tensor = DTensor.from_local(as_bytes, mesh, placements, shape=shape, stride=stride).full_tensor()
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def all_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def differing(found: Mapping[str, bytes], expected: Mapping[str, bytes]) -> list[str]:
    return [name for name in expected if found.get(name) != expected[name]] + [n for n in found if n not in expected]


def section(state: str, master: str) -> OptimizerSection:
    return OptimizerSection(state_dtype=state, master_weights=master)


def key_of(dtype: torch.dtype, state: str, master: str) -> str:
    return f"{str(dtype).removeprefix('torch.')}-{state}-{master}"


def master_adamw(folder: Path) -> Results:
    return updates(MODES)


def updates(modes: list[tuple[torch.dtype, str, str]]) -> Results:
    """By mode and layout: norms, parameters and state that differ from one process's."""
    found: Results = {}
    for mode in modes:
        dtype, state, master = mode
        results: dict[str, tuple[list[float], dict[str, bytes]]] = {}
        for layout in ("one", *LAYOUTS):
            model = make(layout, dtype)
            optimizer = MasterAdamW(model, section(state, master))
            norms = [norm.item() for norm in update(model, optimizer)]
            results[layout] = norms, all_bits(dict(model.named_parameters())) | all_bits(optimizer.state_dict())
        norms, expected = results["one"]
        for layout in LAYOUTS:
            found[f"{key_of(*mode)}-{layout}"] = [results[layout][0] == norms, differing(results[layout][1], expected)]
    return found


def plain_adamw(folder: Path) -> Results:
    """octavo.optim.AdamW with gradients in .grad, and its state dict on another layout."""
    found: Results = {}
    for state in ("fp32", "fp8"):
        results, saved = {}, {}
        for layout in ("one", *LAYOUTS):
            model = make(layout, torch.bfloat16)
            optimizer = AdamW(model.parameters(), state_dtype=state, master_weights="remainder")
            for step in range(3):
                give(model, step)
                optimizer.step()
            saved[layout] = optimizer.state_dict()
            results[layout] = all_bits(dict(model.named_parameters()))
            for name, of in zip(SHAPES, optimizer.state_dict()["state"].values(), strict=True):
                results[layout] |= {f"{name}.{key}": bits(tensor) for key, tensor in of.items()}
            fresh = AdamW(make(layout, torch.bfloat16).parameters(), state_dtype=state, master_weights="remainder")
            for source in ("one", layout):
                fresh.load_state_dict(saved[source])
                again = zip(fresh.state_dict()["state"].values(), saved[layout]["state"].values(), strict=True)
                found[f"{state}-{source}-to-{layout}"] = [differing(all_bits(a), all_bits(b)) for a, b in again]
            found[f"{state}-{layout}-bytes"] = optimizer.num_state_bytes
        for layout in LAYOUTS:
            found[f"{state}-{layout}"] = differing(results[layout], results["one"])
        try:
            AdamW(make("one", torch.bfloat16).parameters(), state_dtype=state, master_weights="remainder").load_state_dict(saved["two"])  # fmt: skip # noqa: E501
        except CheckpointError as error:
            found[f"{state}-refused"] = str(error)
    return found


def checkpoints(folder: Path) -> Results:
    """State saved by torch.distributed.checkpoint on 2 ranks, loaded on each layout, and trained on."""
    import torch.distributed.checkpoint as dcp

    found: Results = {}
    for mode in (MODES[0], (torch.bfloat16, "fp8", "remainder"), (torch.float32, "fp8", "fp32")):
        dtype, state, master = mode
        path = folder / key_of(*mode)
        model = make("two", dtype)
        optimizer = MasterAdamW(model, section(state, master))
        update(model, optimizer)
        group = meshes()["two"].get_group()
        if dist.get_rank() < 2:
            dcp.save(optimizer.state_dict(), checkpoint_id=path, process_group=group)
        plain = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in optimizer.state_dict().items()}
        dist.barrier()
        dcp.load(plain, checkpoint_id=path, no_dist=True)
        update(model, optimizer, first=3)
        expected = all_bits(optimizer.state_dict()) | all_bits(dict(model.named_parameters()))
        for layout, is_plain in itertools.product(("one", *LAYOUTS), (False, True)):
            other = make(layout, dtype, seed=1)
            fresh = MasterAdamW(other, section(state, master))
            fresh.init_state()
            loaded = plain if is_plain else fresh.state_dict()
            if not is_plain and layout == "two":
                if dist.get_rank() < 2:
                    dcp.load(loaded, checkpoint_id=path, process_group=group)
            elif not is_plain:
                dcp.load(loaded, checkpoint_id=path, no_dist=layout == "one")
            if is_plain or layout != "two" or dist.get_rank() < 2:
                fresh.load_state_dict(loaded)
                update(other, fresh, first=3)
                bits_now = all_bits(fresh.state_dict()) | all_bits(dict(other.named_parameters()))
                found[f"{key_of(*mode)}-{layout}-{'plain' if is_plain else 'cut'}"] = differing(bits_now, expected)
    return found


def norms(folder: Path) -> Results:
    found: Results = {}
    for layout in ("one", *LAYOUTS):
        model = make(layout, torch.float32)
        give(model, 0)
        grads = [param.grad for param in model.parameters()]
        found[layout] = global_norm(grads).item()
        local(grads[0])[-1:, -1:] = torch.inf  # the last row of each rank that has one
        found[f"{layout}-inf"] = global_norm(grads).item()
    from torch.distributed.tensor import Shard, distribute_tensor

    columns = distribute_tensor(torch.ones(8, 8), meshes()["four"], [Shard(1)], src_data_rank=None)
    try:
        global_norm([columns])
    except ShapeError as error:
        found["columns"] = str(error)
    return found


def torchs_own(folder: Path) -> Results:
    """torch's clip_grad_norm_ and AdamW, both kinds, against one process: the largest difference."""
    found: Results = {}
    for kind in ("foreach", "fused"):
        results = {}
        for layout in ("one", *LAYOUTS):
            model = make(layout, torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})
            for step in range(2):
                give(model, step)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 40.0)
                optimizer.step()
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
            results[layout] = [norm.view(1), *(p.detach().flatten() for p in params)]
        for layout in LAYOUTS:
            pairs = zip(results[layout], results["one"], strict=True)
            found[f"{kind}-{layout}"] = max(((a - b).abs() / b.abs().clamp_min(1e-3)).max().item() for a, b in pairs)
    return found


def averages(folder: Path) -> Results:
    """torch's EMA of sharded parameters."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    results, found = {}, {}
    for layout in ("one", *LAYOUTS):
        model, average = make(layout, torch.float32), make(layout, torch.float32, seed=1)
        optimizer = MasterAdamW(model, section("fp32", "fp32"))
        average_in = get_ema_multi_avg_fn(0.9)
        for step in range(2):
            update(model, optimizer, first=step, num_steps=1)
            with torch.no_grad():
                average_in(list(average.parameters()), list(model.parameters()), step)
        results[layout] = all_bits(dict(average.named_parameters()))
    for layout in LAYOUTS:
        found[layout] = differing(results[layout], results["one"])
    return found


PARTS: tuple[Callable[[Path], Results], ...] = (master_adamw, plain_adamw, checkpoints, norms, torchs_own, averages)


def job(folder: Path, rank: int) -> Results:
    dist.init_process_group("gloo")
    found = {part.__name__: part(folder) for part in PARTS}
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(functools.partial(job, folder), WORLD)


def of(ranks: list[Results], part: str) -> Iterator[Results]:
    return (found[part] for found in ranks)


def test_an_update_has_the_bits_of_one_process(ranks: list[Results]) -> None:
    for found in of(ranks, "master_adamw"):
        assert found == {f"{key_of(*mode)}-{layout}": [True, []] for mode in MODES for layout in LAYOUTS}


def other_updates(rank: int, world_size: int) -> Results:
    return updates(OTHER_MODES)


@pytest.mark.largest
def test_updates_of_other_modes_have_them_too() -> None:
    assert len(OTHER_MODES) == 6
    for found in run_group(other_updates, WORLD):
        assert found == {f"{key_of(*mode)}-{layout}": [True, []] for mode in OTHER_MODES for layout in LAYOUTS}


def test_adamw_alone_has_them_too_and_loads_whole_state(ranks: list[Results]) -> None:
    for found in of(ranks, "plain_adamw"):
        for state, layout in itertools.product(("fp32", "fp8"), LAYOUTS):
            assert found[f"{state}-{layout}"] == []
            for source in ("one", layout):
                assert found[f"{state}-{source}-to-{layout}"] == [[]] * len(SHAPES)
        assert "cut otherwise than in this run" in found["fp32-refused"]


def test_state_is_sharded(ranks: list[Results]) -> None:
    for state in ("fp32", "fp8"):
        of_one, of_two, of_four = (
            [found[f"{state}-{layout}-bytes"] for found in of(ranks, "plain_adamw")]
            for layout in ("one", "two", "four")
        )
        assert len(set(of_one)) == 1
        assert max(of_two) < 0.6 * of_one[0] and max(of_four) < 0.45 * of_one[0]


def test_a_checkpoint_loads_on_every_layout(ranks: list[Results]) -> None:
    for rank, found in enumerate(of(ranks, "checkpoints")):
        assert len(found) == 3 * (8 if rank < 2 else 7)
        assert all(names == [] for names in found.values()), found


def test_the_norm_has_one_value(ranks: list[Results]) -> None:
    for found in of(ranks, "norms"):
        assert {found[layout] for layout in ("one", *LAYOUTS)} == {found["one"]}
        assert all(found[f"{layout}-inf"] == torch.inf for layout in ("one", *LAYOUTS))
        assert "sharded along dim 0 or replicated, got S" in found["columns"]


def test_torchs_clipping_and_adamw_agree_to_rounding(ranks: list[Results]) -> None:
    for found in of(ranks, "torchs_own"):
        assert all(difference < 1e-5 for difference in found.values()), found


def test_torchs_average_has_the_bits_of_one_process(ranks: list[Results]) -> None:
    for found in of(ranks, "averages"):
        assert found == {layout: [] for layout in LAYOUTS}
