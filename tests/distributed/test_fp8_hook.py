"""DDP with gradients in FP8 on 2 and 4 gloo ranks: bits, what stays in fp32, error feedback over steps, restarts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.distributed.fp8_hook import FP8HookState, fp8_hook
from octavo.distributed.reduced_in_fp8 import reduced_in_fp8
from octavo.errors import CheckpointError, ConfigError, DtypeError
from octavo.testing.assertions import assert_bitwise
from tests.assertions import assert_raises
from tests.distributed.two_shots import sum_in_order, two_shots
from tests.ranks import run_group

WORLDS = (2, 4)
STEPS = 12


class GateRouter(nn.Linear):
    """Foreign code's name for a router."""


class Model(nn.Module):
    """Embedding with a tied head, norm, router, and two linears that octavo converts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 128, _weight=0.1 * torch.randn(50, 128))
        self.norm = nn.LayerNorm(128)
        self.gate = GateRouter(128, 4)
        self.up, self.down = nn.Linear(128, 144), nn.Linear(144, 128)  # no whole blocks a rank
        self.head = nn.Linear(128, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        return self.head(x + self.down(self.up(x).relu()) * self.gate(x).softmax(-1).amax(-1, keepdim=True))


def make() -> Model:
    torch.manual_seed(0)
    model = Model()
    octavo.convert(model, "blockwise", ignore=("head", "gate"))
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    ids = torch.randint(0, 50, (32,), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(ids), (7 * ids + 3) % 50)


class Recorded:
    """The hook, and what went in and came out of it: names, gradients before, gradients after, bucket by bucket."""

    def __init__(self, model: nn.Module, state: FP8HookState) -> None:
        self.state, self.names = state, {parameter: name for name, parameter in model.named_parameters()}
        self.seen: list[tuple[list[str], list[torch.Tensor], list[torch.Tensor]]] = []

    def __call__(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        before = [gradient.clone() for gradient in bucket.gradients()]
        future = fp8_hook(self.state, bucket)
        after = [gradient.clone() for gradient in bucket.gradients()]
        self.seen.append(([self.names[parameter] for parameter in bucket.parameters()], before, after))
        return future


def train(rank: int, steps: range, *, model: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """Steps of SGD: losses, parameters, the hook's state and what it did."""
    model = make() if model is None else model
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)  # 180 KB of gradients in two buckets
    found: dict[str, Any] = {"losses": []}
    state = options.pop("state", None)
    hook = None
    if state is None and options.pop("fp8", True):
        state = FP8HookState(ddp, min_bytes=0, **options)
    if state is not None:
        hook = Recorded(model, state)
        ddp.register_comm_hook(None, hook.__call__)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in steps:
        loss = loss_of(ddp, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        octavo.nn.mark_weights_updated(model)
        found["losses"].append(loss.item())
    found["seen"] = [] if hook is None else hook.seen
    found["parameters"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    found["state"] = state
    return found


def resumed(rank: int, world: int) -> list[torch.Tensor]:
    """Half of the steps, then the rest in a new process's stead: everything made again from what was saved."""
    half = STEPS // 2
    first = train(rank, range(half))
    model = make()
    model.load_state_dict(first["parameters"] | {"head.weight": first["parameters"]["embed.weight"]})
    state = FP8HookState(model, min_bytes=0)
    saved = first["state"].state_dict()
    state.load_state_dict(saved)
    for change in ({"world_size": world + 1}, {"rank": rank + 1}):
        assert_raises(CheckpointError, "residuals belong to their rank", state.load_state_dict, saved | change)
    other = saved | {"residuals": {"norm.weight": torch.zeros(128)}}
    assert_raises(CheckpointError, "residuals of 'norm.weight'", state.load_state_dict, other)
    return list(train(rank, range(half, STEPS), model=model, state=state)["parameters"].values())


def runs(rank: int, world: int) -> dict[str, Any]:
    whole = train(rank, range(STEPS))
    found = {"whole": whole, "resumed": resumed(rank, world)}
    found["plain"] = train(rank, range(STEPS), fp8=False)
    found["once"] = train(rank, range(1), error_feedback=False)
    found["ignored"] = train(rank, range(1), error_feedback=False, ignore=("down",))
    small = FP8HookState(make())  # 16 MiB: no bucket has them
    found["small"] = train(rank, range(1), model=(model := make()), state=FP8HookState(model))
    assert small.min_bytes == 16 << 20
    found["residuals"] = {name: tuple(r.shape) for name, r in whole["state"].state_dict()["residuals"].items()}
    for run in found.values():
        if isinstance(run, dict):
            run.pop("state", None)
    return found


def gradients_of(ranks: list[dict[str, Any]], run: str) -> Iterator[tuple[str, list[torch.Tensor], torch.Tensor]]:
    """(name, every rank's gradient before, rank 0's after) in the order of the buckets."""
    for index, (names, _, after) in enumerate(ranks[0][run]["seen"]):
        for i, name in enumerate(names):
            yield name, [found[run]["seen"][index][1][i] for found in ranks], after[i]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_group(runs, request.param)


def test_matrices_take_two_shots_and_the_rest_fp32(ranks: list[dict[str, Any]]) -> None:
    """Bit for bit, each as if it were alone, whatever shares its bucket; the biases of linears are with the rest."""
    num_fp8 = 0
    for name, before, after in gradients_of(ranks, "once"):
        if name in ("up.weight", "down.weight"):
            num_fp8 += 1
            assert_bitwise(after, two_shots(before, average=True), name)
        else:
            assert_bitwise(after, sum_in_order(before) / len(ranks), name)
    assert num_fp8 == 2


@pytest.mark.parametrize("run", ["ignored", "small"])
def test_what_is_ignored_or_small_is_averaged_in_fp32(run: str, ranks: list[dict[str, Any]]) -> None:
    for name, before, after in gradients_of(ranks, run):
        if run == "small" or name != "up.weight":
            assert_bitwise(after, sum_in_order(before) / len(ranks), name)


def test_every_rank_has_the_same_bits_after_training(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for name, parameter in found["whole"]["parameters"].items():
            assert_bitwise(parameter, ranks[0]["whole"]["parameters"][name], name)


def test_it_trains_as_ddp_does(ranks: list[dict[str, Any]]) -> None:
    fp8, plain = (torch.tensor([found[run]["losses"] for found in ranks]).mean(0) for run in ("whole", "plain"))
    assert fp8[-1] < 0.8 * fp8[0]
    torch.testing.assert_close(fp8, plain, rtol=0.01, atol=0.0)


def test_error_feedback_follows_the_sums_of_exact_gradients(ranks: list[dict[str, Any]]) -> None:
    """What is left after all steps is one step's rounding: a residual a matrix, of its size."""
    assert ranks[0]["residuals"] == {"up.weight": (128 * 144,), "down.weight": (128 * 144,)}
    for name in ("up.weight", "down.weight"):
        steps = [
            (sum_in_order([x.double() for x in before]) / len(ranks), after)
            for _, before, after in gradients_of(ranks, "whole")
            if _ == name
        ]
        errors = torch.stack([after.double() - exact for exact, after in steps])
        assert errors.sum(0).norm() < 0.5 * errors.norm()  # without feedback they add up as noise: 1.0


def test_a_run_goes_on_with_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for ours, wanted in zip(found["resumed"], found["whole"]["parameters"].values(), strict=True):
            assert_bitwise(ours, wanted)


def test_which_gradients_are_reduced_in_fp8() -> None:
    model = make()
    assert list(reduced_in_fp8(model).values()) == ["up.weight", "down.weight"]
    assert list(reduced_in_fp8(model, ["down"]).values()) == ["up.weight"]
    model.up.weight.requires_grad_(False)
    assert list(reduced_in_fp8(model).values()) == ["down.weight"]
    deep = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert list(reduced_in_fp8(deep, ["0.1"]).values()) == ["0.0.weight", "1.weight"]
    assert_raises(ConfigError, "none is 'own'", reduced_in_fp8, model, ["own"])  # no substring of "down"


def test_what_a_state_refuses() -> None:
    assert_raises(ConfigError, "no parameter of this model would be reduced", FP8HookState, nn.LayerNorm(8))
    assert_raises(DtypeError, "0.weight is torch.float16", FP8HookState, nn.Sequential(nn.Linear(8, 8)).half())
