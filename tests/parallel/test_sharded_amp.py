"""octavo.amp, statistics and activation checkpointing on a model sharded over 2 ranks: the bits of one process."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from octavo import amp, nn
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.distributed.shards import local
from octavo.errors import NonFiniteError, RecipeError
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.statistics import TensorStatistics
from octavo.optim import AdamW
from octavo.parallel import shard
from tests.ranks import run_ranks

WORLD = 2
SCHEDULE = [(0, "O1"), (2, "O2"), (4, "O1")]
SWITCHED = ["O1", "O1", "O2", "O2", "O1", "O1", "O1"]
BAD_STEP = 3
Run = Callable[..., torch.Tensor]


class Stack(torch.nn.Module):
    """Layers of two linears and a norm, each run by `run`."""

    def __init__(self, run: Run | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(96), torch.nn.Linear(96, 200), torch.nn.GELU(), torch.nn.Linear(200, 96)
            )
            for _ in range(2)
        )
        self.run = run or (lambda layer, x: layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.run(layer, x)
        return x


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(24, 96, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean() / WORLD


def make(recipe: str, mesh: Mesh, run: Run | None = None) -> torch.nn.Module:
    model = Stack(run)
    nn.convert(model, recipe)
    shard(model, mesh, reduction="ordered")
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, opt_level: str, schedule: Any) -> Any:
    """Seven steps, in one of which a gradient is infinite in a row that the last rank holds."""
    amp.initialize(model, optimizer, opt_level, recipe=None, schedule=schedule, grad_scaler="dynamic")
    handle, levels = amp.handle(optimizer), []
    for step in range(len(SWITCHED)):
        levels.append(handle.level)
        optimizer.zero_grad()
        for rank in range(WORLD):
            if mesh.device_mesh is not None and rank != mesh.rank:
                continue
            loss = loss_of(model, step, rank)
            with amp.scale_loss(loss, optimizer, delay_unscale=rank == 0 and mesh.device_mesh is None) as scaled_loss:
                scaled_loss.backward()
        if step == BAD_STEP and mesh.rank == mesh.world_size - 1:
            local(model.layers[1][3].weight.grad)[-1, 0] = math.inf  # type: ignore[index]
        optimizer.step()
    reasons = [event.reason for event in handle.events if event.kind == "skip"]
    return levels, reasons, handle.scaler.scale, [whole(p) for p in model.parameters()]


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return AdamW(model.parameters(), lr=1e-2, state_dtype="fp8")


def levels_and_switches(mesh: Mesh) -> dict[str, Any]:
    found = {}
    for kind, (level, schedule) in itertools.product(
        ("octavo", "torch"), [("O1", None), ("O2", None), ("O1", SCHEDULE)]
    ):
        results = []
        for ranks in (Mesh.single(), mesh):
            model = make("blockwise", ranks)
            results.append(train(model, make_optimizer(kind, model), ranks, level, schedule))
        (*expected, weights), (*got, sharded) = results
        equal = all(torch.equal(a, b) for a, b in zip(weights, sharded, strict=True))
        found[f"{kind}-{level}-{'switched' if schedule else 'kept'}"] = [expected, got, equal]
    return found


def statistics(mesh: Mesh) -> dict[str, Any]:
    """Rows of this rank's micro-batch, against one process that sees it alone."""
    found: dict[str, Any] = {}
    for recipe in ("blockwise", "rowwise"):
        rows = []
        for ranks in (Mesh.single(), mesh):
            model = make(recipe, ranks)
            watch = TensorStatistics(model)
            for step in range(2):
                loss_of(model, step, mesh.rank).backward()
                watch.step()
            rows.append([row.as_dict() for row in watch.rows()])
            watch.close()
        found[recipe] = [len(rows[0]), rows[0] == rows[1]]
    return found


def checkpointed(mesh: Mesh) -> dict[str, bool]:
    """Whether gradients are those of one process that saves its activations."""
    ways: dict[str, Run | None] = {
        "none": None,
        "octavo": nn.checkpoint,
        "torch": lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
        "reentrant": lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True),
    }
    found = {}
    for recipe in ("blockwise", "rowwise"):
        plain = make(recipe, Mesh.single())
        for rank in range(WORLD):
            loss_of(plain, 0, rank).backward()
        for name, way in ways.items():
            model = make(recipe, mesh, way)
            x = torch.randn(24, 96, generator=torch.Generator().manual_seed(mesh.rank)).requires_grad_()
            (model(x).square().mean() / WORLD).backward()
            pairs = zip(plain.parameters(), model.parameters(), strict=True)
            found[f"{recipe}-{name}"] = all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs)
    return found


def bad_weights(mesh: Mesh) -> dict[str, str]:
    """What check_finite_weights says on each rank of an infinity in a row of the last one."""
    model = make("blockwise", mesh)
    check_finite_weights(model)
    if mesh.rank == WORLD - 1:
        local(model.layers[1][3].weight.detach())[-1, 0] = math.inf  # type: ignore[index]
    try:
        check_finite_weights(model)
    except NonFiniteError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def gathered_codes(mesh: Mesh) -> list[str]:
    """What amp says of ways out of O1 where FP8 codes are gathered; how many steps it takes without one."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    nn.convert(model, "blockwise")
    shard(model, mesh, all_gather_dtype="fp8")
    said = []
    ways: list[dict[str, Any]] = [{"opt_level": "O2"}, {"schedule": SCHEDULE}, {"fallback": amp.Fallback()}]
    for way in ways:
        with pytest.raises(RecipeError) as error:
            amp.initialize(model, torch.optim.SGD(model.parameters()), recipe=None, **way)
        said.append(str(error.value))
    _, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters()), recipe=None)
    with pytest.raises(RecipeError):
        amp.handle(optimizer).switch("O2")
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    return [*said, str(amp.handle(optimizer).num_steps)]


def job(rank: int) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    parts = (levels_and_switches, statistics, checkpointed, bad_weights, gathered_codes)
    found = {part.__name__: part(mesh) for part in parts}
    mesh.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(job, WORLD)


def test_levels_and_switches_have_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["levels_and_switches"]) == 6
        for name, (expected, got, is_equal) in found["levels_and_switches"].items():
            assert got == expected and is_equal, name
            levels, reasons, scale = got
            assert levels == (SWITCHED if name.endswith("switched") else [name.split("-")[1]] * len(SWITCHED))
            assert reasons == ["gradients that are not finite, of layers.1.3.weight; loss scale 65536 -> 32768"]
            assert scale == 2.0**15


def test_gathered_codes_stay_in_o1(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        *said, num_steps = found["gathered_codes"]
        assert len(said) == 3 and all("is gathered as FP8 codes, from which O2 cannot compute" in text for text in said)
        assert num_steps == "1"


def test_statistics_of_a_sharded_model_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["statistics"] == {recipe: [2 * 4 * 6, True] for recipe in ("blockwise", "rowwise")}


def test_activations_made_again_give_the_same_gradients(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["checkpointed"]) == 8
        assert all(found["checkpointed"].values()), found["checkpointed"]


def test_bad_weights_are_named_where_they_are(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["bad_weights"]["said"] == "nothing"
    assert "layers.1.3.weight, shape (48, 200) float32: 0 NaN and 1 inf" in ranks[1]["bad_weights"]["said"]
