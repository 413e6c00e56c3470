"""all_gather_dtype="fp8" on 2 and 4 ranks: bits of one process, a quantization a step, half the bytes, nothing held."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.models import Decoder
from octavo.ops.quantize.many import MatrixBatch
from octavo.parallel import shard
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.data import make_batch
from octavo.train.step import summed_loss
from tests.parallel.gathered_models import (
    RECIPES,
    TOKENS,
    draw,
    held_bytes,
    loss_of,
    make_decoder,
    make_stack,
    train_stack,
    whole,
)
from tests.ranks import run_ranks

KINDS: dict[str, dict[str, Any] | None] = {  # how the layers run, and are compiled
    "eager": None,
    "recomputed": None,
    "compiled": {"backend": "aot_eager", "fullgraph": True},
    "inductor": {"backend": "inductor"},
}
ALL = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
# what of a Decoder's layer is gathered as codes: under one scale a tensor a fused weight has one a part
CODED = {"blockwise": ALL, "tensorwise": (ALL[1], ALL[3]), "delayed by step": (ALL[1], ALL[3])}


@contextmanager
def wire() -> Iterator[list[int]]:
    """Bytes that each all-gather within takes of this rank."""
    sizes: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # since torch 2.13
    run = getattr(dist, name)

    def counted(*tensors: torch.Tensor, **named: Any) -> Any:
        sizes.append((named.get("input_tensor") if len(tensors) < 2 else tensors[1]).nbytes)  # type: ignore[union-attr]
        return run(*tensors, **named)

    with mock.patch.object(dist, name, counted):
        yield sizes


@contextmanager
def casts() -> Iterator[list[int]]:
    """Numbers of weights that were quantized together within."""
    sizes: list[int] = []
    run = MatrixBatch.quantize

    def counted(batch: MatrixBatch, *scales: Any) -> Any:
        sizes.append(len(batch.matrices))
        return run(batch, *scales)

    with mock.patch.object(MatrixBatch, "quantize", counted):
        yield sizes


Trained = tuple[list[float], list[list[torch.Tensor]], list[torch.Tensor]]  # losses, gradients of steps, masters


def train_decoder(model: Decoder, share: range) -> Trained:
    """Three steps of a share of the micro-batches, with masters."""
    optimizer, losses, grads = MasterAdamW(model, OptimizerSection(lr=0.01)), [], []
    for step in range(3):
        for index in share:
            ids = torch.randint(0, 96, (TOKENS + 1,), generator=torch.Generator().manual_seed(50 * step + index))
            loss = summed_loss(model, make_batch([ids.numpy()], None)) / 100
            loss.backward()
            optimizer.accumulate_gradients()
            losses.append(loss.item())
        masters = optimizer._update._masters  # type: ignore[union-attr]
        grads.append([whole(master.grad) for master in masters.values()])
        optimizer.step()
    return losses, grads, [whole(master) for master in masters.values()]


def one_process(recipes: Collection[str], num_ranks: int, folder: Path) -> Path:
    """A file of what this process, which is alone, makes of two micro-batches for each of so many ranks."""
    as_large = dataclasses.replace(Mesh.single(), world_size=num_ranks)
    expected = {recipe: train_decoder(make_decoder(recipe, as_large), range(2 * num_ranks)) for recipe in recipes}
    torch.save(expected, folder / f"{num_ranks}.pt")
    return folder / f"{num_ranks}.pt"


def against_one_process(recipe: str, mesh: Mesh, expected: dict[str, Trained]) -> dict[str, Any]:
    """A Decoder with masters: gradients added in order."""
    losses, grads, masters = expected[recipe]
    model = make_decoder(recipe, mesh, torch.float32)
    report = shard(model, mesh, reduction="ordered", param_dtype=torch.bfloat16, all_gather_dtype="fp8")
    num = 2 * mesh.world_size
    share = mesh.own_share(num)
    own_losses, own_grads, own_masters = train_decoder(model, share)
    pairs = [
        *zip(itertools.chain(*grads), itertools.chain(*own_grads), strict=True),
        *zip(masters, own_masters, strict=True),
    ]
    return {
        "losses": own_losses == [losses[step * num + i] for step in range(3) for i in share],
        "differing": sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs),
        "coded": [line.name for line in report.gathers if not line.reason],
        "held": held_bytes(model),
    }


def evaluations(recipe: str, mesh: Mesh) -> list[bool]:
    """Outputs without gradients before, between and after steps, and the steps: whether they are a bf16 gather's."""
    results = []
    for asked in (None, "fp8"):
        model = make_stack(recipe, mesh)
        shard(model, mesh, reduction="sum", all_gather_dtype=asked)  # type: ignore[arg-type]
        with torch.no_grad():
            found = [model(draw(0, 0))]
        for mode in (torch.inference_mode, torch.no_grad):
            found += train_stack(model, mesh, steps=2)
            model.eval()
            with mode():
                found.append(model(draw(0, 0)).clone())
            model.train()
        results.append(found)
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


def against_bf16(recipe: str, mesh: Mesh, kinds: Collection[str] = tuple(KINDS)) -> dict[str, Any]:
    """The same training with bf16 on the wire: bits, bytes, casts; compiled, recomputed, over micro-batches too."""
    found: dict[str, Any] = {}
    sizes: dict[Any, list[int]] = {}
    for name in kinds:
        results, options = [], KINDS[name]
        for asked in (None, "fp8"):
            torch._dynamo.reset()
            model = make_stack(recipe, mesh, name == "recomputed")
            shard(model, mesh, reduction="sum", all_gather_dtype=asked)  # type: ignore[arg-type]
            if options is not None:
                for layer in model.layers:
                    layer.compile(**options)
            inside: list[int] = []  # bytes of a whole weight in its forward
            model.layers[0].down.register_forward_pre_hook(  # type: ignore[union-attr, operator]
                lambda module, _, inside=inside: inside.append(module.weight.untyped_storage().size())
            )
            with wire() as sizes[name, asked], casts() as made:
                results.append(train_stack(model, mesh))
        found[name] = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        found[f"casts {name}"] = made
        found[f"held {name}"] = [held_bytes(model), *inside]
    norms = 2 * (256 + 256) // mesh.world_size  # norm and bias of a layer, in bf16 on both wires
    found["bytes"] = [sum(sizes["eager", asked]) - norms * len(sizes["eager", asked]) for asked in ("fp8", None)]
    found["counts"] = [len(sizes["eager", asked]) for asked in ("fp8", None)]
    with casts() as made:
        model = make_stack(recipe, mesh)
        shard(model, mesh, reduction="sum", all_gather_dtype="fp8")
        train_stack(model, mesh, steps=2, micro_batches=3)
    found["casts of micro-batches"] = made
    return found


def accumulation(mesh: Mesh) -> list[bool]:
    """Micro-batches without a reduction, under scales that hold for a step: whether they are those of a bf16 gather."""
    found = []
    for recipe in ("blockwise", "tensorwise", "delayed by step"):
        results = []
        for asked in (None, "fp8"):
            model = make_stack(recipe, mesh)
            shard(model, mesh, reduction="sum", all_gather_dtype=asked)  # type: ignore[arg-type]
            results.append(train_stack(model, mesh, steps=3, micro_batches=3))
        found.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return found


def memory(recipe: str, mesh: Mesh) -> dict[str, Any]:
    """Bytes of 8-bit tensors that a compiled layer's backward waits for, and of parameters and codes while whole."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_stack(recipe, mesh)
    shard(model, mesh, reduction="sum", all_gather_dtype="fp8")
    for layer in model.layers:
        layer.compile(backend="inductor", fullgraph=True)
    saved: list[torch.Tensor] = []
    train_stack(model, mesh, steps=3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_of(model, draw(0, 0))
    return {
        "saved": [t.untyped_storage().size() for t in saved if t.element_size() == 1],
        "recompiles": dict(torch._dynamo.utils.counters["recompiles"]),
    }


def fast_job(rank: int, file: Path) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    found = {
        "one": {"blockwise": against_one_process("blockwise", mesh, torch.load(file))},
        "eager": against_bf16("mixed", mesh, ("eager",)),
        "evaluations": evaluations("mixed", mesh),
    }
    mesh.close()
    return found


def slow_job(rank: int, file: Path) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    expected = torch.load(file)
    found: dict[str, Any] = {"one": {recipe: against_one_process(recipe, mesh, expected) for recipe in CODED}}
    found["accumulation"] = accumulation(mesh)
    if mesh.world_size == 4:
        hsdp = Mesh.of_process_group(2, 2, "cpu")
        found["hsdp"] = {recipe: against_one_process(recipe, hsdp, expected) for recipe in CODED}
    else:
        found["bf16"] = {recipe: against_bf16(recipe, mesh) for recipe in RECIPES}
        found["memory"] = {recipe: memory(recipe, mesh) for recipe in RECIPES}
    mesh.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fast_job, 2, one_process(["blockwise"], 2, tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(slow_job, 2, one_process(CODED, 2, tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(slow_job, 4, one_process(CODED, 4, tmp_path_factory.mktemp("four")))


def check_one(found: dict[str, Any], coded: tuple[str, ...]) -> None:
    names = [f"layers.{i}.{name}" for i in range(2) for name in coded]
    assert found == {"losses": True, "differing": 0, "coded": names, "held": 0}


def test_training_has_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        check_one(found["one"]["blockwise"], CODED["blockwise"])


@pytest.mark.largest
@pytest.mark.parametrize("recipe", CODED)
def test_so_it_has_on_four_ranks_and_with_replicas(
    recipe: str, two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    for found in (*two, *four):
        check_one(found["one"][recipe], CODED[recipe])
    for found in four:
        check_one(found["hsdp"][recipe], CODED[recipe])


def check_against_bf16(found: dict[str, Any], recipe: str, kind: str) -> None:
    assert found[kind] and all(found[kind])
    assert found[f"held {kind}"] == [0] * (7 if kind == "recomputed" else 4)  # forwards of three steps
    # two layers in 3 steps, each gathered twice a step; the last of "mixed" has a recipe for each weight
    assert sorted(found[f"casts {kind}"]) == ([1] * 12 + [2] * 6 if recipe == "mixed" else [2] * 12)


def check_bytes(found: dict[str, Any], limit: float) -> None:
    coded, plain = found["bytes"]
    assert 0 < coded <= limit * plain
    assert found["counts"] == [12, 12]  # two layers, three steps, forward and backward


def test_mixed_recipes_have_the_bits_of_a_gather_in_bf16(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        check_against_bf16(found["eager"], "mixed", "eager")
        check_bytes(found["eager"], 0.501)


def test_evaluations_beside_training_have_the_bits_of_a_gather_in_bf16(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["evaluations"] and all(found["evaluations"])


@pytest.mark.largest
@pytest.mark.parametrize("kind", ["eager", "recomputed", "compiled", "inductor"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_has_the_bits_of_a_gather_in_bf16(recipe: str, kind: str, two: list[dict[str, Any]]) -> None:
    """Delayed scaling's scales too. A rank quantizes its rows at each gather, and half the bytes travel."""
    for found in two:
        check_against_bf16(found["bf16"][recipe], recipe, kind)
        check_bytes(found["bf16"][recipe], 0.501)
        # two layers of two weights in 2 steps of 3 micro-batches, each gathered twice; one scale a step
        assert found["bf16"][recipe]["casts of micro-batches"] == [2] * 24


@pytest.mark.largest
def test_micro_batches_without_a_reduction(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    for found in (*two, *four):
        assert found["accumulation"] == [True] * 3


@pytest.mark.largest
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_hold_nothing_whole(recipe: str, two: list[dict[str, Any]]) -> None:
    """Between forward and backward what the graph saved has no memory, and the parameter never has any."""
    for found in two:
        assert found["memory"][recipe] == {"saved": [0] * 4, "recompiles": {}}
