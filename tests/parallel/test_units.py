"""What shard gathers together in models of one's own: nested lists, layers that are listed twice or share weights."""

from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo.distributed.mesh import Mesh
from octavo.parallel import shard
from tests.ranks import run_ranks

WIDTH, STEPS = 32, 3


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Nested(nn.Module):
    """A list of lists, whose members alone are called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.blocks:  # type: ignore[misc]
            x = second(first(x).relu())
        return x


class Uncalled(nn.Module):
    """A list of containers without a forward, of which one holds a list."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleDict({"own": linear(), "more": nn.ModuleList([linear()])}) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = pair["more"][0](pair["own"](x).relu())  # type: ignore[index,operator]
        return x


class Repeated(nn.Module):
    """One layer, listed three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear()] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Tied(nn.Module):
    """Two layers share a weight, and the last one has the first linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = linear(), nn.ModuleList(linear() for _ in range(4))
        self.layers[1].weight = self.layers[0].weight
        self.layers[3].weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return x


UNITS = {
    Nested: ("blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", ""),
    Uncalled: ("pairs.0.more.0", "pairs.1.more.0", ""),
    Repeated: ("layers.0", ""),
    Tied: ("layers.2", ""),
}


def train(kind: type[nn.Module], share: range, mesh: Mesh) -> tuple[tuple[str, ...], list[list[float]]]:
    """The units, and each step's losses of a share of its micro-batches."""
    torch.manual_seed(0)
    model = kind()
    octavo.convert(model, "rowwise")
    units = shard(model, mesh, reduction="ordered").units
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        losses.append([])
        for index in share:
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + index))
            loss = model(x).square().mean()
            loss.backward()
            losses[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return units, losses


def job(rank: int) -> dict[str, Any]:
    mesh = Mesh.from_config(device="cpu")
    found = {kind.__name__: train(kind, range(rank, rank + 1), mesh) for kind in UNITS}
    mesh.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(job, 2)


@pytest.mark.parametrize("kind", UNITS, ids=lambda kind: kind.__name__)
def test_a_model_of_ones_own_has_the_bits_of_one_process(kind: type[nn.Module], ranks: list[dict[str, Any]]) -> None:
    (units, first), (_, second) = (of_rank[kind.__name__] for of_rank in ranks)
    assert units == UNITS[kind]
    _, of_one = train(kind, range(2), Mesh.single())
    assert [[*a, *b] for a, b in zip(first, second, strict=True)] == of_one
