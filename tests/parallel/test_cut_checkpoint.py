"""State of cut models in checkpoints: the bits of the slices in the whole, and back in any other layout."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import octavo
from octavo.distributed.cut import Cut
from octavo.distributed.mesh import Mesh
from octavo.distributed.shards import local
from octavo.errors import OctavoError
from octavo.models import Decoder, ModelConfig
from octavo.models.export import ModelExport
from octavo.nn import ColumnLinear
from octavo.optim.state import cut_of
from octavo.parallel import parallelize, shard
from octavo.parallel.checkpoint import load_file, load_state, save_state
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.run.trainer_state import num_checkpoint_bytes
from tests.ranks import run_group

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 512, "intermediate_size": 512, "num_layers": 1, "max_position_embeddings": 32,
    "num_heads": 4, "num_kv_heads": 4, "head_dim": 128,
}  # fmt: skip
STATES = {
    "full": OptimizerSection(),
    "fp8": OptimizerSection(state_dtype="fp8"),
    "remainder": OptimizerSection(state_dtype="bf16", master_weights="remainder"),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "attention_bias": True},  # biases of rows that are cut
    "gptj": {"family": "gptj", "rotary_dim": 64},
    "tied": {"family": "llama", "tie_word_embeddings": True},
}
CASES = [
    ("llama", "full", "reduce"),
    ("tied", "fp8", "gather"),
    ("llama", "fp8", "reduce"),
    ("gptj", "remainder", "gather"),
    ("gptj", "fp8", "reduce"),
]


def build(family: str, seed: int = 0, *, is_fp32: bool = False) -> Decoder:
    model = Decoder(ModelConfig(**SIZES, **FAMILIES[family]), seed=seed)
    return model.float() if is_fp32 else model


def cut(family: str, mode: str, mesh: Mesh, seed: int = 0) -> Decoder:
    """This rank's part of a model; shards are fp32, which are their own masters."""
    model = build(family, seed, is_fp32=mesh.world_size > 1)
    if mesh.tensor_group is not None:
        parallelize(model, mesh, mode=mode)  # type: ignore[arg-type]
    if mesh.world_size > 1:
        shard(model, mesh, reduction="sum", param_dtype=torch.bfloat16)
    return model


def optimizer_of(model: Decoder, state: str) -> MasterAdamW:
    optimizer = MasterAdamW(model, STATES[state])
    optimizer.init_state()
    return optimizer


def stepped(model: Decoder, state: str, gradients: Decoder) -> MasterAdamW:
    """After a step on the gradients that another model of the layout has as parameters."""
    optimizer = optimizer_of(model, state)
    for parameter, gradient in zip(model.parameters(), gradients.parameters(), strict=True):
        parameter.grad = gradient.detach().clone()
    optimizer.accumulate_gradients()
    optimizer.step()
    return optimizer


def slices(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in tensors.items()}


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert a.keys() == b.keys()
    pairs = {name: [x[name].reshape(-1).contiguous().view(torch.uint8) for x in (a, b)] for name in a}
    return [name for name, (x, y) in pairs.items() if not torch.equal(x, y)]


def write_job(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Steps of cut models, saved; this rank's slices."""
    mesh, found = Mesh.of_process_group(1, 1, "cpu", world), dict[str, Any]()
    for family, state, mode in CASES:
        name = f"{family} {state} {mode}"
        model = cut(family, mode, mesh)
        optimizer = stepped(model, state, cut(family, mode, mesh, seed=1))
        save_state(optimizer.state_dict(), folder / name, mesh.host_group, optimizer.state_cuts())
        octavo.save_model(model, folder / f"{name} model")
        found[name] = slices(optimizer.state_dict())
        found[f"{name} bytes"] = num_checkpoint_bytes(model, optimizer, ModelExport(model))
    found["refused"] = refusals(mesh, folder)
    return found


def refusals(mesh: Mesh, folder: Path) -> list[str]:
    """Another state's folder; a linear that nothing has cut; a dialect of one process."""
    optimizer = optimizer_of(cut("llama", "gather", mesh), "fp8")
    own = torch.nn.Sequential(ColumnLinear(8, 8, group=mesh.tensor_group))  # type: ignore[arg-type]
    calls: list[Callable[[], Any]] = [
        lambda: load_state(folder / "gptj remainder gather", optimizer.state_dict(), optimizer.state_cuts()),
        lambda: MasterAdamW(own, STATES["full"]).state_cuts(),
        lambda: octavo.save_model(cut("llama", "gather", mesh), folder / "no", dialect="fp8-block"),
    ]
    texts = []
    for call in calls:
        with pytest.raises(OctavoError) as error:
            call()
        texts.append(str(error.value))
    return texts


def read_job(rank: int, world: int, folder: Path, degree: int) -> dict[str, Any]:
    """Both kinds of files read into this layout, saved once more where shards cut the slices; this rank's slices."""
    mesh, found = Mesh.of_process_group(1, world // degree, "cpu", degree), dict[str, Any]()
    for family, state, mode in CASES:
        if state == "remainder" and world > degree:
            continue  # fp32 shards have no remainder
        name = f"{family} {state} {mode}"
        model = cut(family, mode, mesh)
        for read, place in ((load_state, folder / name), (load_file, folder / f"{name}.safetensors")):
            optimizer = optimizer_of(model, state)
            read(place, optimizer.state_dict(), optimizer.state_cuts())
            found[f"{name} {place.suffix}"] = slices(optimizer.state_dict())
        save_state(optimizer.state_dict(), folder / f"{name} again", mesh.host_group, optimizer.state_cuts())
        optimizer.load_state_dict(optimizer.state_dict())
        octavo.save_model(model, folder / f"{name} model again")
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], int]:
    folder = tmp_path_factory.mktemp(f"cut-{request.param}")
    return folder, run_group(functools.partial(write_job, folder=folder), request.param), request.param


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_whole_state_has_the_bits_of_one_process(case: tuple[str, str, str], folder: Any) -> None:
    """Moments of 8 and 16 bits are rounded by an element's place on its rank; their scales and masters are not."""
    family, state, _ = case
    model = build(family)
    optimizer = stepped(model, state, build(family, seed=1))
    one, num_bytes = optimizer.state_dict(), num_checkpoint_bytes(model, optimizer, ModelExport(model))
    assert [found[f"{' '.join(case)} bytes"] for found in folder[1]] == [num_bytes] * folder[2]
    assert num_bytes > sum(tensor.nbytes for tensor in (*one.values(), *model.parameters()))  # random numbers' state
    whole = load_state(folder[0] / " ".join(case))
    rounded = () if state == "full" else ("exp_avg.", "exp_avg_sq.")
    assert [name for name in differing(one, whole) if not name.startswith(rounded)] == []
    written = octavo.load_model(folder[0] / f"{' '.join(case)} model", trainable=True)
    assert differing(dict(model.named_parameters()), dict(written.named_parameters())) == []


def test_slices_come_back_from_one_process(folder: Any) -> None:
    """And as they were written; saved once more, they are the same whole."""
    place, written, world = folder
    states = save_as_one_process(place)
    for rank, found in enumerate(run_group(functools.partial(read_job, folder=place, degree=world), world)):
        for case in CASES:
            for suffix in ("", ".safetensors"):
                assert differing(written[rank][" ".join(case)], found[f"{' '.join(case)} {suffix}"]) == []
    for name, state in states.items():
        assert differing(state, load_state(place / f"{name} again")) == []


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
def test_slices_are_sharded_and_saved_again(folder: Any, degree: int) -> None:
    """Into two ranks of a cut beside two shards, and into four shards."""
    place, *_ = folder
    states = save_as_one_process(place)
    run_group(functools.partial(read_job, folder=place, degree=degree), 4)
    for name, state in states.items():
        if "remainder" not in name:
            assert differing(state, load_state(place / f"{name} again")) == []
            ends = ("", " again")  # the shards are fp32 masters
            first, again = (octavo.load_model(place / f"{name} model{end}", dtype=torch.bfloat16) for end in ends)
            assert differing(dict(first.named_parameters()), dict(again.named_parameters())) == []


def save_as_one_process(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Files of a run in one process that has taken over each state."""
    states = {}
    for family, state, mode in CASES:
        name = f"{family} {state} {mode}"
        optimizer = optimizer_of(build(family), state)
        optimizer.load_state_dict(load_state(folder / name))
        states[name] = optimizer.state_dict()
        save_file(states[name], folder / f"{name}.safetensors")
    return states


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(("num_rows", "size"), [(64, 1), (128, 1), (32, 3), (4, 32)])
def test_all_ranks_refuse_scales_that_are_cut_alike(ranks: int, num_rows: int, size: int) -> None:
    """Also a last rank, whose slice may begin and end with a block where no other one does."""
    shape = (ranks * num_rows, size)
    cuts = [Cut(shape, (slice(rank * num_rows, (rank + 1) * num_rows),)) for rank in range(ranks)]
    assert {cut_of("exp_avg_scale", cut) is None for cut in cuts} == {num_rows * size % 128 != 0}


def test_what_does_not_fit_is_refused(folder: Any) -> None:
    for found in folder[1]:
        state, linear, dialect = found["refused"]
        assert "it belongs to another architecture, or to other settings of the optimizer" in state
        assert "0 was made as a slice, so where it lies in a whole linear is not known" in linear
        assert "a sharded or cut model is written as 'bf16', got dialect='fp8-block'" in dialect
