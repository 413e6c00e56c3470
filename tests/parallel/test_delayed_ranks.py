"""Delayed scaling with one update of scales an optimizer step: ranks have the bits of one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo import nn
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.errors import ShapeError
from octavo.models import Decoder, ModelConfig
from octavo.nn.fp8_state import agree_on_staged_amaxes
from octavo.numerics import Numerics, get_recipe
from octavo.parallel import shard
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.data import make_batch
from octavo.train.step import summed_loss
from tests.ranks import run_ranks

STEPS, SAVED, TOKENS = 20, 10, 24
RECIPE = get_recipe("delayed", update_every="step", amax_history_len=6)


def make(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config = ModelConfig("llama", 96, 64, 128, 2, 2, 1, 32, max_position_embeddings=64, tie_word_embeddings=False)
    model = Decoder(config, seed=0).to(dtype)
    model.set_numerics(Numerics(RECIPE))
    return model


def loss_of(model: Decoder, step: int, index: int, num: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    ids = torch.randint(0, 96, (TOKENS + 1,), generator=generator)
    return summed_loss(model, make_batch([ids.numpy()], None)) / (num * TOKENS)


def new_optimizer(model: torch.nn.Module) -> MasterAdamW:
    return MasterAdamW(model, OptimizerSection(lr=0.01))


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()  # type: ignore[operator]


def train(
    model: Decoder, optimizer: MasterAdamW, share: range, num: int, steps: range, called: Any = None
) -> list[dict[str, Any]]:
    """Losses, gradients, scales and histories of each step.

    Args:
        share: of the step's `num` micro-batches.
        called: what runs the forward where it is not the model: a wrapper of it.
    """
    found = []
    for step in steps:
        losses = []
        for index in share:
            loss = loss_of(called or model, step, index, num)
            loss.backward()
            optimizer.accumulate_gradients()
            losses.append(loss.item())
        masters = optimizer._update._masters  # type: ignore[union-attr]
        grads = {name: whole(master.grad) for name, master in masters.items()}
        optimizer.step()
        state = {name: tensor.clone() for name, tensor in nn.fp8_state_dict(model).items()}
        found.append({"losses": losses, "grads": grads, "state": state})
    return found


def compare(got: list[dict[str, Any]], expected: list[dict[str, Any]], share: range) -> dict[str, int]:
    """By kind: how many values of all steps differ."""
    pairs = list(zip(got, expected, strict=True))
    found = {"losses": sum(g["losses"] != [e["losses"][i] for i in share] for g, e in pairs)}
    for kind in ("grads", "state"):
        assert all(g[kind].keys() == e[kind].keys() and g[kind] for g, e in pairs)
        found[kind] = sum(not torch.equal(g[kind][name], e[kind][name]) for g, e in pairs for name in e[kind])
    return found


def sharded(mesh: Mesh, num: int) -> dict[str, Any]:
    """As many micro-batches as one process has, sharded; then from a state saved midway, with FP8 on the wire."""
    model, share = make(), mesh.own_share(num)
    expected = train(model, new_optimizer(model), range(num), num, range(STEPS))

    def build(gathers: Any) -> tuple[Decoder, MasterAdamW]:
        model = make(torch.float32)
        report = shard(model, mesh, reduction="ordered", param_dtype=torch.bfloat16, all_gather_dtype=gathers)
        assert any(not row.reason for row in report.gathers) == (gathers == "fp8")
        return model, new_optimizer(model)

    model, optimizer = build(None)
    got = train(model, optimizer, share, num, range(SAVED))
    saved = [{k: v.clone() for k, v in state.items()} for state in (optimizer.state_dict(), nn.fp8_state_dict(model))]
    got += train(model, optimizer, share, num, range(SAVED, STEPS))
    model, optimizer = build("fp8")
    optimizer.load_state_dict(saved[0])
    nn.load_fp8_state_dict(model, saved[1])
    resumed = train(model, optimizer, share, num, range(SAVED, STEPS))
    return {"straight": compare(got, expected, share), "resumed": compare(resumed, expected[SAVED:], share)}


def ordered_sum(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DistributedDataParallel: gradients added in rank order."""
    pieces = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, bucket.buffer())
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(total)
    return future


class Replicated:
    """What loss_of reads of a model, with the forward of its DistributedDataParallel."""

    def __init__(self, model: Decoder) -> None:
        self._model, self._ddp = model, torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        self._ddp.register_comm_hook(None, ordered_sum)

    def __call__(self, *args: Any) -> Any:
        return self._ddp(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def replicated(mesh: Mesh) -> dict[str, int]:
    num, share = mesh.world_size, range(mesh.rank, mesh.rank + 1)
    model = make(torch.float32)
    expected = train(model, new_optimizer(model), range(num), num, range(STEPS))
    model = make(torch.float32)
    got = train(model, new_optimizer(model), share, num, range(STEPS), Replicated(model))
    return compare(got, expected, share)


def plain(seed: int = 0, recipe: Any = RECIPE, layers: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(layers)))
    nn.convert(model, recipe)
    return model


def batch(step: int, index: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(50 * step + index)) * (1 + index)


def forward(model: torch.nn.Sequential, x: torch.Tensor, skipped: set[int]) -> torch.Tensor:
    for index, layer in enumerate(model):
        x = x if index in skipped else layer(x)
    return x


# (step, micro-batch) -> layers that it skips: from the first step on, all of them too, and one everywhere
SKIPPED = {(0, 0): {0}, (0, 1): {1}, (1, 1): {0, 1, 2}, (2, 0): {2}, (2, 1): {2}, (2, 2): {2}, (2, 3): {2}}


def skipping(rank: int, world: int) -> dict[str, bool]:
    """Layers that run on some ranks alone, beside a frozen scorer with gradients on one rank alone."""

    def run(share: range, scores: bool) -> list[torch.Tensor]:
        model, found = plain(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scorer = copy.deepcopy(model) if scores else None
        for step in range(5):
            grads = [torch.zeros_like(p) for p in model.parameters()]
            for index in share:
                out = forward(model, batch(step, index), SKIPPED.get((step, index), set()))
                if out.requires_grad:
                    out.square().mean().backward()
                if scorer is not None:
                    scorer(batch(step, index)).sum().backward()
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad if parameter.grad is None else parameter.grad
                if len(share) == 1:  # the sum of all ranks, in whatever order: this compares scales
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            found += [layer.fp8_quant_scale.clone() for layer in model]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.2 * (step + 1))  # the same on all sides
            optimizer.zero_grad()
        return found

    expected, got = run(range(world), False), run(range(rank, rank + 1), rank == 0)
    recipe = get_recipe("delayed", amax_history_len=6)
    model = plain(recipe=recipe)  # by forwards: the collectives have the same sizes on ranks that skip and on others
    for step in range(3):
        forward(model, batch(step, rank), {0} if step == 0 and rank == 0 else set()).sum().backward()
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)),
        "changes": [not torch.equal(a, b) for a, b in zip(got[::3], got[3::3], strict=False)],
        "by_forward": all(all(_of_all(layer.fp8_quant_scale)) for layer in model[1:]),
    }


def _of_all(tensor: torch.Tensor) -> list[bool]:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return [torch.equal(copy, tensor) for copy in copies]


def not_finite(rank: int) -> dict[str, list[Any]]:
    """NaN in one rank's batch, then infinity in one rank's: the scales of the input and whether ranks agree."""
    found: dict[str, list[Any]] = {}
    for bad in ("nan", "inf"):
        for where in (0, 1):
            model = plain(layers=1)
            x = batch(0, 0)
            x[0, 0] = float(bad) if rank == where else 1.0
            model(x).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()
            state = nn.fp8_state_dict(model)
            found.setdefault(bad, []).extend(all(_of_all(tensor.nan_to_num(-1.0))) for tensor in state.values())
            found[bad] += [bool(state["0.fp8_quant_scale"].isfinite().all())]
            found[bad] += [not bool(state["0.fp8_amax_history"].isnan().any())]
    return found


def staged_alike(rank: int) -> list[bool]:
    """Whether a state between a backward and the next forward is that of all ranks, and changes no later scale."""
    recipe = get_recipe("delayed", amax_compute_algo="most_recent")
    asked, left = plain(recipe=recipe), plain(recipe=recipe)
    for model in (asked, left):
        model((1 + rank) * batch(0, rank)).sum().backward()
    agree_on_staged_amaxes(asked)
    found = [all(_of_all(tensor)) for tensor in nn.fp8_state_dict(asked).values()]
    found.append(not all(all(_of_all(tensor)) for tensor in nn.fp8_state_dict(left).values()))
    for model in (asked, left):
        model(batch(1, rank))
    states = (nn.fp8_state_dict(model).values() for model in (asked, left))
    return found + [torch.equal(a, b) for a, b in zip(*states, strict=True)]


def count_collectives(rank: int, also_compiled: bool) -> dict[str, list[Any]]:
    """All-reduces of the forward and backward of two micro-batches, then of the optimizer's step; and the scales."""
    found: dict[str, list[Any]] = {}
    for name in ("eager", "compiled") if also_compiled else ("eager",):
        torch._dynamo.reset()
        model = plain()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if name == "compiled" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        counts = []
        for step in range(3):
            with torch.profiler.profile() as passes:
                for index in range(2):
                    run(batch(step, 2 * index + rank)).square().mean().backward()
            with torch.profiler.profile() as update:
                optimizer.step()
            counts.append([sum(e.name == "gloo:all_reduce" for e in p.events()) for p in (passes, update)])
            for parameter in model.parameters():  # no ranks' sum here: the same weights on both sides
                parameter.data.fill_(0.01)
            nn.mark_weights_updated(model)
        found[name] = [counts, [layer.fp8_quant_scale.tolist() for layer in model]]
    return found


def mismatch(rank: int) -> str:
    """One rank has a linear more than the others."""
    model = plain(layers=4 if rank == 0 else 3)
    model(batch(0, rank)).sum().backward()
    with pytest.raises(ShapeError) as error:
        nn.update_scales(model)
    return str(error.value)


def job(rank: int) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(timeout_s=60), "cpu")
    found: dict[str, Any] = {"sharded": sharded(mesh, 4), "replicated": replicated(mesh)}
    found["skipping"] = skipping(rank, mesh.world_size)
    found["not_finite"] = not_finite(rank)
    found["collectives"] = count_collectives(rank, mesh.world_size == 4)
    found["mismatch"] = mismatch(rank)
    found["staged_alike"] = staged_alike(rank)
    mesh.close()
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(job, request.param)


EQUAL = {"losses": 0, "grads": 0, "state": 0}


def test_sharded_training_has_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    assert all(found["sharded"]["straight"] == EQUAL for found in ranks)


def test_a_resumed_run_has_the_bits_of_one_that_went_on(ranks: list[dict[str, Any]]) -> None:
    assert all(found["sharded"]["resumed"] == EQUAL for found in ranks)


def test_replicated_training_has_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    assert all(found["replicated"] == EQUAL for found in ranks)


def test_ranks_may_skip_layers_and_score_alone(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["skipping"] == {"equal": True, "changes": [True] * 4, "by_forward": True}


def test_amaxes_are_free_of_nan_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert all(found["not_finite"]["nan"]) and all(found["not_finite"]["inf"])


def test_what_is_staged_can_be_saved_by_one_rank(ranks: list[dict[str, Any]]) -> None:
    assert all(all(found["staged_alike"]) for found in ranks)


def test_one_collective_a_step(ranks: list[dict[str, Any]]) -> None:
    """In the first step another one compares the linears of the ranks."""
    for found in ranks:
        scales = found["collectives"]["eager"][1]
        for counts, _ in found["collectives"].values():
            assert [passes for passes, _ in counts] == [0, 0, 0]
            assert [update for _, update in counts][1:] == [1, 1]
        assert found["collectives"].get("compiled", [0, scales])[1] == scales
        assert found["collectives"] == ranks[0]["collectives"]


def test_ranks_with_other_linears_are_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "got 3 on one and 4 on another" in found["mismatch"]
