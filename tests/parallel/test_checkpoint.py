"""Checkpoints of several ranks: resharded in equal bits, whole or not there whatever one rank meets, and exported."""

import functools
import json
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import octavo
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.distributed.outcome import together
from octavo.distributed.shards import cut, local, shard_of
from octavo.errors import CheckpointError, OctavoError
from octavo.models import Decoder, ModelConfig, save_model
from octavo.models.export import ModelExport
from octavo.nn import PackedContext
from octavo.numerics import Numerics, get_recipe
from octavo.parallel import load_sharded, load_weights, shard
from octavo.parallel.staging import HostCopies
from octavo.run.checkpoint_store import CheckpointStore
from tests.assertions import assert_raises
from tests.ranks import run_ranks

LLAMA = ModelConfig("llama", 96, 256, 256, 2, 2, 1, 128, max_position_embeddings=64, tie_word_embeddings=False)
SHAPES = {"even": (8, 6), "uneven": (5, 3), "short": (1, 4), "vector": (7,)}
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int16, torch.float8_e4m3fn)


def values(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of all shapes and dtypes of random bits, whole."""
    generator = torch.Generator().manual_seed(seed)
    found = {"step": torch.tensor(float(seed)), "rng": torch.randint(0, 256, (11,), generator=generator)}
    for name, shape in SHAPES.items():
        for dtype in DTYPES:
            bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            found[f"{str(dtype).removeprefix('torch.')}.{name}"] = bits.view(dtype).view(shape)
    return found


def spread(mesh: Mesh, seed: int) -> dict[str, torch.Tensor]:
    """values(seed), the matrices and vectors as DTensors."""
    return {name: as_shard(mesh, t) if "." in name else t for name, t in values(seed).items()}


def as_shard(mesh: Mesh, tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    like = distribute_tensor(torch.zeros(tensor.shape), mesh.device_mesh, [Replicate(), Shard(0)])
    return shard_of(cut(tensor, like).clone(), like, tensor.shape)


def has_bits(mesh: Mesh, found: dict[str, torch.Tensor], seed: int) -> bool:
    """Whether this rank's rows are those of values(seed)."""
    expected = spread(mesh, seed)
    return found.keys() == expected.keys() and all(is_same(local(found[n]), local(expected[n])) for n in expected)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def zeros(mesh: Mesh) -> dict[str, torch.Tensor]:
    found = spread(mesh, 0)
    for tensor in found.values():
        local(tensor).zero_()
    return found


def model(seed: int = 0) -> Decoder:
    made = Decoder(LLAMA, seed=seed)
    made.set_numerics(Numerics(get_recipe("blockwise")))
    return made


def sharded(mesh: Mesh, seed: int = 0) -> Decoder:
    made = model(seed)
    shard(made, mesh, all_gather_dtype="fp8")
    return made


def caught(run: Callable[[], object]) -> list[Any]:
    """[class, text] of the error that a call raises."""
    try:
        run()
    except OctavoError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


@contextmanager
def small_disk(rank: int, num_bytes: int) -> Iterator[None]:
    """No file of one rank may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["RANK"]) == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def start(replicas: int = 1) -> Mesh:
    return Mesh.from_config(ParallelSection(data_parallel_replicate_degree=replicas), "cpu")


def two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """All that the fast tests look at; `folder` holds what one process wrote before."""
    mesh = start()
    store = CheckpointStore(folder / "run", keep=9, mesh=mesh)
    found: dict[str, Any] = {}

    old = CheckpointStore(folder / "old", mesh=mesh).find_latest()
    assert old is not None
    found["old"] = has_bits(mesh, old.load_state(zeros(mesh)), seed=1)
    wrong = zeros(mesh) | {"float32.even": as_shard(mesh, torch.zeros(9, 6))}
    found["wrong shape"] = caught(lambda: old.load_state(wrong))

    store.save({"step": 2}, spread(mesh, 2), ModelExport(sharded(mesh)))
    first = store.find_latest()
    assert first is not None
    found["resaved"] = has_bits(mesh, first.load_state(zeros(mesh)), seed=2)
    found["found"] = [first.path.name, first.step]

    save_model(sharded(mesh), folder / "split", max_shard_bytes=600_000)
    found["loaded"] = [
        all(is_same(local(a), local(b)) for a, b in zip(got.parameters(), sharded(mesh).parameters(), strict=True))
        for got in (
            load_sharded(folder / "split", mesh, recipe="blockwise", all_gather_dtype="fp8"),
            load_sharded(folder / "run", mesh, recipe="delayed"),
        )
    ]
    rounded = model().float()
    shard(rounded, mesh, param_dtype=torch.bfloat16)
    with torch.no_grad():
        local(rounded.norm.weight).add_(2**-20)
        rounded(
            torch.arange(4), PackedContext.from_lengths([4], rounded.numerics, "cpu")
        )  # FSDP2 keeps the root's bf16 parameters
    save_model(rounded, folder / "fp32")

    refilled = sharded(mesh, seed=7)
    loss = refilled(torch.arange(4), PackedContext.from_lengths([4], refilled.numerics, "cpu")).float().square().mean()
    loss.backward()
    load_weights(refilled, folder / "split")
    found["refilled"] = [
        refilled.weight_version,
        is_same(local(refilled.norm.weight), local(sharded(mesh).norm.weight)),
    ]
    found["codes"] = caught(lambda: load_sharded(folder / "codes", mesh))
    found["dialect"] = caught(lambda: save_model(sharded(mesh), folder / "no", "fp8-block"))

    broken = sharded(mesh)
    if rank == 1:
        local(broken.layers[0].mlp.down_proj.weight)[0] = float("nan")
    found["nan"] = caught(lambda: store.save({"step": 4}, spread(mesh, 4), ModelExport(broken)))
    for part, limit, size in (("model", 20_000, 2), ("trainer", 2_000_000, 1_200_000)):
        state = {"x": as_shard(mesh, torch.zeros(size))}
        with small_disk(1, limit):
            export = ModelExport(sharded(mesh))
            found[f"full {part}"] = caught(lambda s=state, e=export: store.save({"step": 4}, s, e))
    found["left"] = sorted(path.name for path in (folder / "run").iterdir())
    found["callable"] = caught(lambda: store.save({"step": 4}, {}, lambda _: None))
    with mock.patch.object(Path, "is_dir", return_value=rank == 0):
        found["not shared"] = caught(lambda: save_model(sharded(mesh), folder / "no"))
    try:
        together(mesh.host_group, lambda: 1 // (1 - rank))
    except RuntimeError as error:
        found["other"] = str(error)
    found |= in_background(mesh, folder, sharded(mesh))
    mesh.close()
    return found


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no page-locked memory")


def refusal(save: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as error:
        save()
    return str(error.value)


def in_background(mesh: Mesh, folder: Path, weights: Decoder) -> dict[str, Any]:
    """Saves that training overtakes, one that fails, and one after it."""
    store = CheckpointStore(folder / "background", keep=9, mesh=mesh, is_async=True)
    state = spread(mesh, 2)
    store.reserve(state, ModelExport(weights))
    store.save({"step": 2}, state, ModelExport(weights))
    with torch.no_grad():
        for tensor in (*state.values(), *weights.parameters()):
            local(tensor).fill_(1)
        weights.mark_weights_updated()
    store.wait()
    saved = store.find_latest()
    assert saved is not None
    found: dict[str, Any] = {"copied": has_bits(mesh, saved.load_state(zeros(mesh)), seed=2)}
    large = {"x": as_shard(mesh, torch.zeros(1_200_000))}
    with small_disk(1, 2_000_000):
        found["begun"] = caught(lambda: store.save({"step": 4}, large, ModelExport(weights)))
        found["raised late"] = caught(store.wait)
    with mock.patch.object(HostCopies, "copy", HostCopies.copy if mesh.is_first else no_memory):
        found["no memory"] = refusal(lambda: store.save({"step": 5}, large, ModelExport(weights)))
    store.save({"step": 6}, large, ModelExport(weights))
    store.wait()
    found["background"] = sorted(path.name for path in store.root.iterdir())
    shard_of_second = store.path_of(6) / "trainer" / "__1_0.distcp"
    together(mesh.host_group, lambda: flip(shard_of_second) if mesh.is_first else None)
    with warnings.catch_warnings(record=True) as warned:
        older = store.find_latest()
    together(mesh.host_group, lambda: flip(shard_of_second) if mesh.is_first else None)
    found["damaged"] = [older and older.step, [str(warning.message) for warning in warned]]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks did, and where."""
    folder = tmp_path_factory.mktemp("two")
    CheckpointStore(folder / "old").save({"step": 1}, values(1), ModelExport(model()))
    save_model(model(), folder / "whole", max_shard_bytes=600_000)
    save_model(model(), folder / "codes", "fp8-block")
    return folder, run_ranks(functools.partial(two_ranks, folder=folder), 2)


def test_checkpoint_of_one_process_is_read_by_two(two: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = two
    for found in ranks:
        assert found["old"]
        assert found["wrong shape"][0] == "CheckpointError"
        assert "float32.even is torch.float32 of shape (8, 6), this run's is" in found["wrong shape"][1]


def test_checkpoint_of_two_is_read_by_two_and_by_one(two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = two
    for found in ranks:
        assert found["resaved"]
        assert found["found"] == ["step-00000002", 2]
    checkpoint = CheckpointStore(folder / "run").find_latest()
    assert checkpoint is not None
    listed = set(json.loads((checkpoint.path / "manifest.json").read_text()))
    assert listed == files_of(checkpoint.path).keys() - {"manifest.json"}
    assert {"trainer/.metadata", "trainer/__0_0.distcp", "trainer/__1_0.distcp"} <= listed
    whole, expected = checkpoint.load_state(), values(2)
    assert sorted(whole) == sorted(expected)
    assert all(is_same(whole[name], tensor) for name, tensor in expected.items())
    like = {"step": torch.zeros(()), "float32.even": torch.zeros(1), "nothing": torch.zeros(1)}
    some = checkpoint.load_state(like)
    assert sorted(some) == ["float32.even", "step"]
    assert some["step"] is like["step"]
    assert like["step"].item() == 2.0
    assert is_same(some["float32.even"], expected["float32.even"]), "as it was saved"


def test_model_of_shards_has_the_files_of_a_whole_one(two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = two
    expected = files_of(folder / "whole")
    assert sum(name.endswith(".safetensors") for name in expected) > 2
    assert files_of(folder / "split") == expected
    assert files_of(folder / "run" / "step-00000002" / "model") == files_of(folder / "old" / "step-00000001" / "model")
    assert ranks[0]["loaded"] == ranks[1]["loaded"] == [True, True]
    assert ranks[0]["refilled"] == ranks[1]["refilled"] == [1, True]
    exported = octavo.load_model(folder / "fp32")
    assert exported.dtype == torch.float32
    assert is_same(exported.norm.weight, model().float().norm.weight + 2**-20), "not what was gathered in bf16"


def test_what_one_rank_meets_all_raise_and_nothing_is_left(two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = two
    texts = {
        "nan": ["CheckpointError", "rank 1: the model: layers.0.mlp.down_proj.weight holds 256 NaN"],
        "full model": ["StorageError", "checkpoint of step 4: rank 1: "],
        "full trainer": ["StorageError", "checkpoint of step 4: rank 1: "],
        "raised late": ["StorageError", "checkpoint of step 4: rank 1: "],
        "codes": ["CheckpointError", "codes, and a sharded model is trained from values in high precision"],
        "dialect": ["ConfigError", "a sharded or cut model is written as 'bf16'"],
        "callable": ["ConfigError", "through a ModelExport"],
        "not shared": ["CheckpointError", f"rank 1: {folder} must be on a file system that all ranks share"],
    }
    for key, (kind, text) in texts.items():
        assert ranks[0][key] == ranks[1][key], key
        assert ranks[0][key][0] == kind, key
        assert text in ranks[0][key][1], ranks[0][key]
    assert ranks[0]["no memory"] == ranks[1]["no memory"] == "rank 1: MemoryError: no page-locked memory"
    assert ranks[0]["other"] == ranks[1]["other"]
    assert ranks[0]["other"].startswith("rank 1: ZeroDivisionError: ")
    for key, part in (("full model", "model"), ("full trainer", "trainer")):
        text, last = ranks[0][key][1], folder / "run" / "step-00000002"
        assert f"step-00000004/{part} cannot be written: File too large" in text, text
        assert text.endswith(f"choose a path on another disk; the last good one is {last}")
    assert ranks[0]["left"] == ["LATEST", "step-00000002"]


def test_background_save_holds_what_was_when_it_began(two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = two
    for found in ranks:
        assert found["copied"]
        assert found["begun"] == ["nothing", ""], "the error is of the next save or wait"
        assert found["background"] == ["LATEST", "step-00000002", "step-00000006"]
    sync, background = folder / "run" / "step-00000002", folder / "background" / "step-00000002"
    assert files_of(background / "model") == files_of(sync / "model")
    assert sorted(files_of(background)) == sorted(files_of(sync))


def test_first_rank_finds_damage_and_tells_the_others(two: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = two
    assert [found["damaged"][0] for found in ranks] == [2, 2]
    assert "step-00000006 is skipped: the content of trainer/__1_0.distcp" in ranks[0]["damaged"][1][0]
    assert ranks[1]["damaged"][1] == []


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: (p / "trainer" / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "flipped": (lambda p: flip(p / "trainer" / "__1_0.distcp"), "the content of trainer/__1_0.distcp is not what"),
    "no metadata": (lambda p: (p / "trainer" / ".metadata").unlink(), ".metadata is missing"),
    "model": (lambda p: flip(p / "model" / "model.safetensors"), "the content of model/model.safetensors is not what"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_in_any_rank_s_part_is_seen(two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, kind: str) -> None:
    folder, _ = two
    root = shutil.copytree(folder / "background", tmp_path / "run")
    damage, reason = DAMAGES[kind]
    damage(root / "step-00000006")
    with pytest.warns(UserWarning, match=f"step-00000006 is skipped: {reason}"):
        found = CheckpointStore(root).find_latest()
    assert found is not None
    assert found.step == 2


def test_unreadable_shards_are_an_error(two: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, _ = two
    checkpoint = CheckpointStore(shutil.copytree(folder / "run", tmp_path / "run")).find_latest()
    assert checkpoint is not None
    for name in ("__1_0.distcp", ".metadata"):
        os.truncate(checkpoint.path / "trainer" / name, 10)
        assert_raises(CheckpointError, "trainer cannot be read", checkpoint.load_state)


def reshard(rank: int, root: Path, steps: tuple[int, int], seed: int, replicas: int = 1) -> bool:
    """Load one step, compare, and save it as the next with this number of ranks."""
    mesh = start(replicas)
    store = CheckpointStore(root, keep=9, mesh=mesh)
    state = spread(mesh, seed)
    is_equal = True
    if steps[0]:
        found = store.find_latest()
        assert found is not None
        state = found.load_state(zeros(mesh))
        is_equal = found.step == steps[0] and has_bits(mesh, state, seed)
    store.save({"step": steps[1]}, state, ModelExport(sharded(mesh)))
    mesh.close()
    return is_equal


@pytest.mark.slow
def test_four_to_two_to_one_and_back_in_equal_bits(tmp_path: Path) -> None:
    root, expected = tmp_path / "run", values(3)
    for ranks, steps in ((4, (0, 1)), (2, (1, 2))):
        assert all(run_ranks(functools.partial(reshard, root=root, steps=steps, seed=3), ranks))
    store = CheckpointStore(root, keep=9)
    checkpoint = store.find_latest()
    assert checkpoint is not None
    whole = checkpoint.load_state()
    assert all(is_same(whole[name], tensor) for name, tensor in expected.items())
    store.save({"step": 3}, whole, ModelExport(model()))
    for ranks, steps, replicas in ((2, (3, 4), 1), (4, (4, 5), 2)):
        again = functools.partial(reshard, root=root, steps=steps, seed=3, replicas=replicas)
        assert all(run_ranks(again, ranks))
    models = [files_of(root / f"step-{step:08d}" / "model") for step in range(1, 6)]
    assert all(files == models[0] for files in models)


def save_and_die(rank: int, root: Path, is_async: bool) -> None:
    mesh = start()
    store = CheckpointStore(root, mesh=mesh, is_async=is_async)
    store.save({"step": 2}, spread(mesh, 2), ModelExport(sharded(mesh)))
    store.wait()
    if rank == 1:
        from torch.distributed.checkpoint import filesystem

        write = filesystem._write_item

        def kill(*args: Any) -> Any:
            write(*args)
            (root.parent / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        filesystem._write_item = kill
    store.save({"step": 4}, spread(mesh, 4), ModelExport(sharded(mesh)))
    store.wait()


@pytest.mark.parametrize("is_async", [False, True])
def test_rank_killed_in_a_save_leaves_the_step_before(tmp_path: Path, is_async: bool) -> None:
    root = tmp_path / "run"
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        run_ranks(functools.partial(save_and_die, root=root, is_async=is_async), 2)
    assert (tmp_path / "killed").exists()
    assert (root / "LATEST").read_text() == "step-00000002\n"
    found = CheckpointStore(root).find_latest()
    assert found is not None
    assert found.step == 2
    whole = found.load_state()
    assert all(is_same(whole[name], tensor) for name, tensor in values(2).items())
    assert sorted(path.name for path in root.iterdir()) == ["LATEST", "step-00000002"], "no leftovers"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
