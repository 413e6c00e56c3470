"""The checkpoint store under faults: whatever breaks, and whenever, a whole checkpoint is found again."""

import errno
import functools
import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError, StorageError
from octavo.models import Decoder, ModelConfig, save_model
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.export import ModelExport
from octavo.numerics import Numerics, get_recipe
from octavo.parallel.staging import HostCopies
from octavo.run import atomic
from octavo.run.checkpoint_store import CheckpointStore
from octavo.run.manifest import find_damage
from octavo.testing.assertions import assert_bitwise
from tests.assertions import assert_raises


class Crash(BaseException):
    """Stands for a kill: nothing catches it by accident."""


def write_model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def save(store: CheckpointStore, step: int) -> Path:
    return store.save({"step": step}, {"x": torch.full((3,), float(step))}, write_model)


def latest_step(root: Path) -> int | None:
    found = CheckpointStore(root).find_latest()
    if found is None:
        return None
    assert found.load_state()["x"].tolist() == [float(found.step)] * 3
    return found.step


def test_latest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.find_latest() is None
    for step in (2, 4, 6):
        path = save(store, step)
    assert latest_step(store.root) == 6
    assert (store.root / "LATEST").read_text() == "step-00000006\n"
    assert sorted(p.name for p in store.root.iterdir()) == ["LATEST", "step-00000004", "step-00000006"]
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "model", "trainer.json", "trainer.safetensors"]


def count_file_operations(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch, crash_at: int | None) -> int:
    """Run with every replace, rename, fsync, write, tree removal counted; crash just before number crash_at."""
    num_operations = 0

    def guarded(operation: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal num_operations
            if num_operations == crash_at:
                raise Crash
            num_operations += 1
            return operation(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for owner, name in ((os, "replace"), (os, "rename"), (os, "fsync"), (Path, "write_text"), (shutil, "rmtree")):
            patch.setattr(owner, name, guarded(getattr(owner, name)))
        if crash_at is None:
            run()
        else:
            assert_raises(Crash, None, run)
    return num_operations


@pytest.mark.parametrize("keep", [1, 2])
def test_crash_between_any_two_file_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    def prepare(root: Path) -> CheckpointStore:
        store = CheckpointStore(root, keep)
        for step in (2, 4):
            save(store, step)
        return store

    store = prepare(tmp_path / "whole")
    num_operations = count_file_operations(lambda: save(store, 6), monkeypatch, None)
    assert num_operations >= 10, "files, directories, renames and removals are seen"
    for crash_at in range(num_operations):
        store = prepare(tmp_path / str(crash_at))
        count_file_operations(lambda store=store: save(store, 6), monkeypatch, crash_at)
        pointer = (store.root / "LATEST").read_text().strip()
        assert find_damage(store.root / pointer) is None, crash_at
        assert latest_step(store.root) in (4, 6)
        assert not [p.name for p in store.root.iterdir() if p.name.startswith(".")], "leftovers stay"
        # The run goes on: the same step is saved again and the rest is as if nothing had happened.
        save(store, 6)
        assert latest_step(store.root) == 6
        assert len(list(store.root.glob("step-*"))) == keep


def test_crash_while_the_same_step_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path / "whole")
    save(store, 4)
    save(store, 6)
    num_operations = count_file_operations(lambda: save(store, 6), monkeypatch, None)
    for crash_at in range(num_operations):
        store = CheckpointStore(tmp_path / str(crash_at))
        save(store, 4)
        save(store, 6)
        count_file_operations(lambda store=store: save(store, 6), monkeypatch, crash_at)
        gone = not (store.root / "step-00000006").exists()
        if gone:
            with pytest.warns(UserWarning, match="names step-00000006, which is not there"):
                assert latest_step(store.root) == 4
        else:
            assert latest_step(store.root) == 6


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: os.truncate(p / "trainer.safetensors", 20), "trainer.safetensors has 20 bytes instead of"),
    "flipped": (
        lambda p: (p / "trainer.json").write_text((p / "trainer.json").read_text().replace("6", "7")),
        "the content of trainer.json is not what was written",
    ),
    "missing model": (lambda p: shutil.rmtree(p / "model"), "config.json is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "bad manifest": (lambda p: (p / "manifest.json").write_text('{"a": '), "manifest.json cannot be used"),
    "empty": (lambda p: [shutil.rmtree(p), p.mkdir()], "manifest.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (2, 4, 6):
        path = save(store, step)
    damage, reason = DAMAGES[kind]
    damage(path)
    with pytest.warns(UserWarning, match=f"step-00000006 is skipped: {reason}"):
        assert latest_step(tmp_path) == 4


@pytest.mark.parametrize("keep", [1, 2])
def test_going_on_after_a_damaged_one_keeps_the_new_ones(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep)
    save(CheckpointStore(tmp_path, 5), 2)
    (save(CheckpointStore(tmp_path, 5), 6) / "manifest.json").unlink()
    save(store, 4)
    assert latest_step(tmp_path) == 4
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"][-keep:]


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (save(store, 2) / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="skipped"):
        assert_raises(CheckpointError, "start over with --no-resume", store.find_latest)


def test_latest_lost_or_pointing_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    save(store, 4)
    (tmp_path / "LATEST").unlink()
    assert latest_step(tmp_path) == 4
    (tmp_path / "LATEST").write_text("step-00000002\n")  # a person sets the run back
    assert latest_step(tmp_path) == 2
    (tmp_path / "LATEST").write_bytes(b"step-0000\xb0002\n")  # a flipped bit: no UTF-8
    with pytest.warns(UserWarning, match="which is not there; trying the newest one"):
        assert latest_step(tmp_path) == 4
    assert store.newest() is None


def test_failing_model_writer_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        raise CheckpointError("NaN")

    store = CheckpointStore(tmp_path)
    save(store, 2)
    assert_raises(CheckpointError, None, store.save, {"step": 4}, {}, fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000002"]


def test_manifest_covers_every_file(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 2)
    listed = set(json.loads((path / "manifest.json").read_text()))
    assert listed == {"model/config.json", "trainer.json", "trainer.safetensors"}


def test_atomic_write_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    atomic.write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Crash()))
    assert_raises(Crash, None, atomic.write_atomic, path, "new")
    assert path.read_text() == "old"


LLAMA = ModelConfig("llama", 96, 64, 128, 2, 2, 1, 32, max_position_embeddings=64)


def test_background_save_has_the_bytes_of_one_that_waits(tmp_path: Path) -> None:
    model = Decoder(LLAMA, seed=0)
    model.set_numerics(Numerics(get_recipe("delayed")))
    model.kv_scales = tuple(KVScales(torch.tensor([0.5]), torch.tensor([0.25])) for _ in range(2))
    state = {"x": torch.arange(5.0), "view": torch.arange(12).view(3, 4).t(), "none": torch.zeros(0, 3)}
    waiting = CheckpointStore(tmp_path / "waiting")
    waiting.save({"step": 2}, state, functools.partial(save_model, model))
    exported = CheckpointStore(tmp_path / "exported").save({"step": 2}, state, ModelExport(model))
    store = CheckpointStore(tmp_path / "background", is_async=True)
    path = store.save({"step": 2}, state, ModelExport(model))
    with torch.no_grad():
        for tensor in (*state.values(), *model.parameters()):
            tensor.zero_()
    model.mark_weights_updated()
    store.wait()
    expected = files_of(waiting.path_of(2))
    assert files_of(path) == files_of(exported) == expected
    assert len(expected) == 7


@pytest.mark.gpu
def test_a_step_waits_for_the_copies_of_a_save_in_the_background(tmp_path: Path) -> None:
    linear = torch.nn.Linear(1024, 1024, device="cuda")  # 4 MiB, and a bias that is copied at once
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    export = ModelExport(Decoder(LLAMA, seed=0))
    store = CheckpointStore(tmp_path, is_async=True, optimizer=optimizer)
    store.save({"step": 1}, linear.state_dict(), export)
    store.wait()
    stream = store._copies._stream
    assert stream is not None
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # half a second, in which the copies do not begin
    store.save({"step": 2}, linear.state_dict(), export)
    assert not stream.query()  # save came back before
    linear(torch.ones(8, 1024, device="cuda")).square().sum().backward()
    optimizer.step()
    store.wait()
    found = store.find_latest()
    assert found is not None and found.step == 2
    saved = found.load_state()
    for name, tensor in linear.state_dict().items():
        assert_bitwise(saved[name], before[name].cpu(), name)
        assert not torch.equal(tensor, before[name])


def test_a_store_that_is_dropped_gives_its_memory_back(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    store = CheckpointStore(tmp_path, is_async=True, optimizer=optimizer)
    copies = weakref.ref(store._copies)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    del store
    gc.collect()
    assert copies() is None and not optimizer._optimizer_step_pre_hooks
    CheckpointStore(tmp_path, optimizer=optimizer)  # which copies nothing
    assert not optimizer._optimizer_step_pre_hooks


def test_only_an_optimizers_step_holds_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(HostCopies, "hold_writes", lambda copies: asked.append(copies))
    linear = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    CheckpointStore(tmp_path, is_async=True)
    linear(torch.ones(2)).sum().backward()
    optimizer.step()
    assert not asked
    store = CheckpointStore(tmp_path, is_async=True, optimizer=optimizer)
    optimizer.zero_grad()
    assert not asked
    optimizer.step()
    assert asked == [store._copies]


def test_background_save_that_fails_says_so_at_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(LLAMA, seed=0)
    store = CheckpointStore(tmp_path, is_async=True)
    save = functools.partial(store.save, state={}, write_model=ModelExport(model))
    save({"step": 2})
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        save({"step": 4})
        assert_raises(StorageError, "checkpoint of step 4: .*the last good one is .*step-00000002", save, {"step": 6})
    store.wait()
    assert (tmp_path / "LATEST").read_text() == "step-00000002\n"
    save({"step": 6})
    store.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000002", "step-00000006"]


def test_background_save_takes_an_export(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, is_async=True)
    assert_raises(ConfigError, "through a ModelExport", store.save, {"step": 2}, {}, write_model)


def test_state_is_taken_over_in_place(tmp_path: Path) -> None:
    """Scales of 8-bit moments were flat once; what has another shape otherwise is as it was saved."""
    store = CheckpointStore(tmp_path)
    scales = torch.arange(6.0)
    store.save({"step": 2}, {"scale": scales, "history": torch.ones(4, 3), "old": torch.ones(1)}, write_model)
    found = store.find_latest()
    assert found is not None
    like = {"scale": torch.zeros(3, 2), "history": torch.zeros(2, 3), "new": torch.zeros(1)}
    state = found.load_state(like)
    assert state.keys() == {"scale", "history"}
    assert state["scale"] is like["scale"]
    assert torch.equal(like["scale"], scales.view(3, 2))
    assert torch.equal(state["history"], torch.ones(4, 3))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
