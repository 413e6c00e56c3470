"""shard on 2 and 4 ranks: gradients and masters of three steps have the bits of one process."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import nn
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.errors import ConfigError, DtypeError, ShapeError
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, get_recipe
from octavo.parallel import shard
from octavo.parallel.fp8_reduce_scatter import use_fp8_reduce_scatter
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.data import make_batch
from octavo.train.step import summed_loss
from tests.ranks import run_ranks

RECIPES = ("bf16", "tensorwise", "rowwise", "blockwise")
MICRO_BATCHES, TOKENS = 8, 32  # of a step


def make(recipe: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config = ModelConfig("llama", 96, 64, 128, 2, 2, 1, 32, max_position_embeddings=64, tie_word_embeddings=False)
    model = Decoder(config, seed=0).to(dtype)
    model.set_numerics(Numerics(get_recipe(recipe)))
    return model


def loss_of(model: Decoder, step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    ids = torch.randint(0, 96, (TOKENS + 1,), generator=generator)
    return summed_loss(model, make_batch([ids.numpy()], None)) / (MICRO_BATCHES * TOKENS)


def train(model: Decoder, share: range) -> dict[str, Any]:
    """Losses of a share of micro-batches, and gradients and masters of three steps, whole."""
    optimizer = MasterAdamW(model, OptimizerSection(lr=0.01))
    found: dict[str, Any] = {"losses": [], "grads": []}
    for step in range(3):
        for index in share:
            loss = loss_of(model, step, index)
            loss.backward()
            optimizer.accumulate_gradients()
            found["losses"].append(loss.item())
        masters = optimizer._update._masters  # type: ignore[union-attr]
        found["grads"].append({name: whole(master.grad) for name, master in masters.items()})
        optimizer.step()
    found["masters"] = {name: whole(master) for name, master in masters.items()}
    return found


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def differences(recipe: str, mesh: Mesh, reduction: str, of_one: dict[str, Any]) -> dict[str, Any]:
    """Elements that differ from one process, and the largest relative difference."""
    expected = of_one[recipe]
    model = make(recipe, torch.float32)
    report = shard(model, mesh, reduction=reduction, param_dtype=torch.bfloat16)  # type: ignore[arg-type]
    got = train(model, mesh.own_share(MICRO_BATCHES))
    losses = [expected["losses"][s * MICRO_BATCHES + i] for s in range(3) for i in mesh.own_share(MICRO_BATCHES)]
    pairs = [(g[n], e[n]) for g, e in zip(got["grads"], expected["grads"], strict=True) for n in e]
    pairs += [(got["masters"][name], expected["masters"][name]) for name in expected["masters"]]
    bits = [(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs]
    return {
        "losses": got["losses"] == losses,
        "differing": sum(int((a != b).sum()) for a, b in bits),
        "relative": max(float((a - b).norm() / b.norm()) for a, b in pairs[: len(expected["masters"])]),
        "units": report.units,
        "share": report.num_local_bytes / (4 * report.num_params),
    }


def job(rank: int, file: Path) -> dict[str, Any]:
    mesh, of_one = Mesh.from_config(ParallelSection(), "cpu"), torch.load(file)
    found: dict[str, Any] = {recipe: differences(recipe, mesh, "ordered", of_one) for recipe in RECIPES}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["sum"] = differences("blockwise", mesh, "sum", of_one)
    found["warnings"] = [str(each.message) for each in caught]
    found["mean"] = mean_of_plain(mesh)
    model = make("bf16", torch.float32)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, mesh, reduction="ordered")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ConfigError, match="this SGD was made before the model was sharded"):
        early.step()
    del early
    for unit in (model, model.layers[0]):
        unit.set_requires_gradient_sync(True)  # type: ignore[union-attr,operator]
        with pytest.raises(ConfigError, match="without gradient sync a rank would add its own first"):
            unit.set_requires_gradient_sync(False)  # type: ignore[union-attr,operator]
    with pytest.raises(ConfigError, match="was sharded with reduction='ordered'"):
        use_fp8_reduce_scatter(model)
    found["unused"] = refusal_of_unused(mesh)
    found["frozen"] = gradients_of_later_frozen(mesh)
    found["unequal"] = refusal_of_unequal(mesh)
    found["converted"] = refusal_of_late_conversion(mesh)
    if mesh.world_size == 4:
        hsdp = Mesh.of_process_group(2, 2, "cpu")
        found["hsdp ordered"] = differences("blockwise", hsdp, "ordered", of_one)
        found["hsdp sum"] = differences("blockwise", hsdp, "sum", of_one)
    mesh.close()
    return found


def mean_of_plain(mesh: Mesh) -> bool:
    """A foreign module whose loss is a mean: the default is what DDP and FSDP2 give."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)).bfloat16()
    nn.convert(model, "blockwise")
    inputs = torch.randn(mesh.world_size, 16, 64).bfloat16()
    grads = []
    for x in inputs:
        model(x).float().square().mean().backward()
        grads.append([p.grad.float() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    shard(model, mesh)
    model(inputs[mesh.rank]).float().square().mean().backward()
    expected = [torch.stack(of_all).mean(0) for of_all in zip(*grads, strict=True)]
    got = [whole(p.grad).float() for p in model.parameters()]
    return all(torch.allclose(a, b, rtol=1e-2, atol=1e-6) for a, b in zip(got, expected, strict=True))  # bf16 sums


def refusal_of_unused(mesh: Mesh) -> str:
    model = torch.nn.Linear(8, 8)
    model.unused = torch.nn.Linear(8, 8)
    shard(model, mesh, reduction="ordered")
    with pytest.raises(ShapeError, match="needs a gradient of every parameter") as error:
        model(torch.ones(2, 8)).sum().backward()
    return str(error.value)


def gradients_of_later_frozen(mesh: Mesh) -> list[list[bool]]:
    """Which of two parameters get a gradient while one is frozen, which was not when it was sharded, and afterwards."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    shard(model, mesh, reduction="ordered")
    found = []
    for trains in (False, True):
        model[0].requires_grad_(trains)
        model(torch.ones(2, 8)).sum().backward()
        found.append([p.grad is not None for p in model.parameters()])
        model.zero_grad()
    return found


def refusal_of_unequal(mesh: Mesh) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(mesh.rank if index == 2 else 1.0)
    with pytest.raises(ConfigError) as error:
        shard(model, mesh)
    return str(error.value)


def refusal_of_late_conversion(mesh: Mesh) -> list[str]:
    """Where a linear is a unit of its own, and where it is a part of one."""
    texts = []
    for layers in (torch.nn.ModuleList([torch.nn.Linear(8, 8)]), torch.nn.Sequential(torch.nn.Linear(8, 8))):
        model = torch.nn.Module()
        model.layers = layers
        shard(model, mesh)
        nn.convert(model, "bf16")  # which replaces nothing
        with pytest.raises(ConfigError) as error:
            nn.convert(model, "blockwise")
        texts.append(str(error.value))
    return texts


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of what one process makes of all micro-batches, under each recipe."""
    file = tmp_path_factory.mktemp("one") / "process.pt"
    torch.save({recipe: train(make(recipe), range(MICRO_BATCHES)) for recipe in RECIPES}, file)
    return file


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def ranks(request: pytest.FixtureRequest, of_one: Path) -> list[dict[str, Any]]:
    return run_ranks(job, request.param, of_one)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ordered_gradients_have_the_bits_of_one_process(recipe: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found[recipe]["losses"] and found[recipe]["differing"] == 0


def test_a_sum_is_equal_but_for_the_order(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sum"]["relative"] < 1e-6  # fp32 sums of 8 terms


def test_no_unit_returns_a_view_of_which_fsdp2_warns(ranks: list[dict[str, Any]]) -> None:
    assert [text for found in ranks for text in found["warnings"] if "view" in text] == []


def test_the_mean_is_that_of_the_losses(ranks: list[dict[str, Any]]) -> None:
    assert all(found["mean"] for found in ranks)


def test_replicas_are_added_in_order_too(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        if "hsdp ordered" in found:
            assert found["hsdp ordered"]["losses"] and found["hsdp ordered"]["differing"] == 0
            assert found["hsdp sum"]["relative"] < 1e-6
            assert found["hsdp sum"]["share"] == 0.5


def test_a_rank_keeps_its_share(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["bf16"]["share"] == 1 / len(ranks)
        assert found["bf16"]["units"] == ("layers.0", "layers.1", "")


def test_an_ordered_reduction_refuses_parameters_without_gradients(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "the sum of the bits of 1.weight" in found["unequal"]
        assert "unused.weight" in found["unused"] and "reduction='sum'" in found["unused"]


def test_parameters_may_be_frozen_and_freed_later(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["frozen"] == [[False, True], [True, True]]


def test_convert_after_sharding_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["converted"]) == 2
        for text in found["converted"]:
            assert "layers.0 is sharded already" in text and "call octavo.convert first" in text


def test_ordered_needs_fp32_parameters() -> None:
    with pytest.raises(DtypeError, match="needs fp32 parameters, got embed_tokens"):
        shard(make("bf16"), Mesh.single(), reduction="ordered")


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction must be one of"):
        shard(make("bf16"), Mesh.single(), reduction="max")  # type: ignore[arg-type]


def test_on_one_process_nothing_rounds_parameters() -> None:
    with pytest.raises(ConfigError, match="this is one process: embed_tokens"):
        shard(make("bf16", torch.float32), Mesh.single(), param_dtype=torch.bfloat16)


def test_on_one_process_nothing_changes() -> None:
    model = make("bf16")
    report = shard(model, Mesh.single())
    assert report.num_local_bytes == 2 * report.num_params == sum(p.nbytes for p in model.parameters())
    assert "gradients: mean" in str(report) and type(model.norm.weight) is torch.nn.Parameter
