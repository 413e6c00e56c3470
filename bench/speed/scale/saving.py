"""`save`: for how long training stands still while a sharded Qwen3-8B is saved, and what it does meanwhile."""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.speed.scale.layers import TrainStep, build_training, train_config
from bench.speed.scale.session import Session
from bench.timing import synchronize
from octavo.distributed.shards import local
from octavo.models import Decoder
from octavo.models.export import ModelExport
from octavo.parallel.checkpoint import load_state
from octavo.run.checkpoint_store import MODEL_DIR, SHARDS, CheckpointStore
from octavo.run.optimizer import MasterAdamW
from octavo.run.trainer_state import trainer_state
from octavo.testing.assertions import assert_bitwise

NUM_LAYERS = 36
# A save that waits for the disk takes about as long as the background took to write; longer ones are left out.
_MOST_S = 45.0


def save(session: Session) -> None:
    """In the background, then waiting for the disk."""
    session.attempt("save", lambda: _measure(session))


def _measure(session: Session) -> None:
    folder = session.save_dir / "scale-checkpoints"
    try:
        _remove(session, folder)
        _check(session, folder / "small")
        session.free()
        _time(session, folder)
    finally:
        _remove(session, folder)


def _remove(session: Session, folder: Path) -> None:
    session.mesh.barrier()
    if session.mesh.is_first:
        shutil.rmtree(folder, ignore_errors=True)
    session.mesh.barrier()


def _time(session: Session, folder: Path) -> None:
    model, optimizer = build_training(session, train_config(session, NUM_LAYERS))
    step = TrainStep(session, model, optimizer)
    undisturbed = session.time_step(step, warmup=2, timed=4)
    state = {**trainer_state(model, optimizer), **dict(model.named_parameters())}
    shards = [local(tensor) for tensor in state.values()]
    num_bytes = sum({shard.data_ptr(): shard.nbytes for shard in shards}.values())
    case = (
        f"Qwen3-8B ({model.config.num_layers} layers) on {session.mesh.world_size} GPUs, bf16 parameters, 16-bit "
        "remainders, FP8 moments"
    )
    held = session.largest(num_bytes) / 1e9
    session.record.add(case, "state and parameters on a rank", "GB", held)
    session.say(f"{case}: {held:.2f} GB a rank")
    written_s = _in_background(session, case, step, undisturbed.ms, folder)
    session.keep()
    if written_s > _MOST_S:
        session.say(f"{case}: writing took {written_s:.0f} s, so that no save that waits for it is timed")
        return
    saver = _Saver(session, model, optimizer, folder / "waiting", is_async=False)
    case = f"{case}: waiting for the disk"
    seconds, _ = saver.save()
    session.record.add(case, "training stands still", "s", seconds)
    session.say(f"{case}: {seconds:.2f} s")
    session.keep()


def _check_bits(session: Session, saver: "_Saver", wanted: dict[str, torch.Tensor]) -> None:
    """The last checkpoint of the trainer's state has these bits on every rank."""
    like = {name: torch.zeros_like(tensor) for name, tensor in trainer_state(saver.model, saver.optimizer).items()}
    _compare(session, load_state(saver.store.path_of(saver.number) / SHARDS, like), wanted)


def _compare(session: Session, read: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    def compare() -> None:
        assert read.keys() == wanted.keys(), "every tensor was read"
        for name, tensor in wanted.items():
            assert_bitwise(local(read[name]), tensor, f"{name} of a checkpoint")

    session.check(compare)


def _in_background(session: Session, case: str, step: TrainStep, undisturbed_ms: float, folder: Path) -> float:
    """Rows of saves in the background; seconds until the disk had one."""
    saver = _Saver(session, step.model, step.optimizer, folder / "background", is_async=True)
    reserved_s = session.largest(_seconds(saver.reserve))
    case = f"{case}: in the background"
    session.record.add(case, "taking the memory of the copies, once", "s", reserved_s)
    session.say(f"{case}: memory taken in {reserved_s:.1f} s")
    for ordinal in ("first", "second"):
        wanted = saver.clone_state() if ordinal == "first" else {}
        began = time.perf_counter()
        # with the step after it, which may wait for copies of what it would change
        saved_s, whole_s = saver.save(step)
        still_s = max(saved_s, whole_s - undisturbed_ms / 1e3)
        meanwhile = session.time_step(step, warmup=0, timed=4)
        saver.store.wait()
        written_s = session.largest(time.perf_counter() - began)
        peer = ("step undisturbed", undisturbed_ms)
        session.record.add(case, f"training stands still, {ordinal} save", "s", still_s)
        session.record.add(case, f"of it in save itself, {ordinal} save", "s", saved_s)
        session.record.add(case, f"until it is on the disk, {ordinal} save", "s", written_s)
        session.record.add_times(case, f"step meanwhile, {ordinal} save", "ms", meanwhile.timing, 1.0, *peer)
        session.say(
            f"{case}, {ordinal} save: {still_s:.3f} s, of it in save {saved_s:.3f}; on the disk after {written_s:.1f} "
            f"s; a step meanwhile {meanwhile.ms:.1f} ms, undisturbed {undisturbed_ms:.1f}"
        )
        if wanted:  # training has gone on while it was copied
            read_s = session.largest(_seconds(functools.partial(_check_bits, session, saver, wanted)))
            session.say(f"{case}, {ordinal} save: read in {read_s:.1f} s, and equal in bits to what was saved")
        session.keep()
    path = saver.store.path_of(saver.number)
    for name, what in ((MODEL_DIR, "model"), (SHARDS, "trainer's state")):
        files = [file for file in (path / name).rglob("*") if file.is_file()]
        session.record.add(case, f"files of the {what}", "GB", sum(file.stat().st_size for file in files) / 1e9)
    return written_s


class _Saver:
    """Checkpoints of a run in a folder of their own, of which one stays."""

    def __init__(
        self, session: Session, model: Decoder, optimizer: MasterAdamW, folder: Path, *, is_async: bool
    ) -> None:
        self.session, self.model, self.optimizer, self.number = session, model, optimizer, 0
        self.folder, self.is_async = folder, is_async
        self.store = CheckpointStore(folder, 1, session.mesh, is_async=is_async, optimizer=optimizer)

    def clone_state(self) -> dict[str, torch.Tensor]:
        """This rank's shards of what a save has."""
        state = trainer_state(self.model, self.optimizer)
        return {name: local(tensor).clone() for name, tensor in state.items()}

    def reserve(self) -> None:
        """Take the memory of the copies."""
        self.store.reserve(trainer_state(self.model, self.optimizer), ModelExport(self.model))
        self.store.wait()

    def save(self, then: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Save; seconds until the slowest rank may go on, and until the GPUs have done what comes then."""
        _remove(self.session, self.folder)  # the disk may not have room for two
        self.number += 1
        synchronize(self.session.device)
        began = time.perf_counter()
        state, export = trainer_state(self.model, self.optimizer), ModelExport(self.model)
        self.store.save({"step": self.number}, state, export)
        saved_s = time.perf_counter() - began
        then()
        synchronize(self.session.device)
        return self.session.largest(saved_s), self.session.largest(time.perf_counter() - began)


def _seconds(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _check(session: Session, folder: Path) -> None:
    """What a small model's save in the background reads back as, on each rank, while training has gone on."""
    small = dataclasses.replace(session, is_toy=True)
    config = train_config(small, 2)
    model, optimizer = build_training(small, config)
    step = TrainStep(small, model, optimizer)
    step()
    saver = _Saver(small, model, optimizer, folder, is_async=True)
    wanted = saver.clone_state()
    saver.save()
    step()
    saver.store.wait()
    found = saver.store.find_latest()
    assert found is not None, "it was saved"
    like = trainer_state(*build_training(small, config))
    _compare(session, found.load_state(like), wanted)
