"""`save`: for how long training stands still while a sharded Qwen3-8B is saved, and what it does meanwhile."""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.speed.scale.layers import TrainStep, build_training, train_config
from bench.speed.scale.session import Session
from octavo.distributed.shards import local
from octavo.models import Decoder
from octavo.models.export import ModelExport
from octavo.run.checkpoint_store import CheckpointStore
from octavo.run.optimizer import MasterAdamW
from octavo.run.trainer_state import trainer_state
from octavo.testing.assertions import assert_bitwise

NUM_LAYERS = 36
_NUM_SAVES = 2
# A save that waits for the disk takes about as long as the background took to write; longer ones are left out.
_MOST_S = 40.0


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
    undisturbed = session.time_step(step, timed=4)
    state = {**trainer_state(model, optimizer), **dict(model.named_parameters())}
    shards = [local(tensor) for tensor in state.values()]
    num_bytes = sum({shard.data_ptr(): shard.nbytes for shard in shards}.values())
    case = (
        f"Qwen3-8B ({model.config.num_layers} layers) on {session.mesh.world_size} GPUs, bf16 parameters, 16-bit "
        f"remainders, FP8 moments, {session.largest(num_bytes) / 1e9:.2f} GB a rank"
    )
    written_s = _in_background(session, case, step, undisturbed.ms, folder)
    if written_s > _MOST_S:
        session.say(f"{case}: writing took {written_s:.0f} s, so that no save that waits for it is timed")
        return
    seconds = _Saver(session, model, optimizer, folder / "waiting", is_async=False).save()
    session.record.add(f"{case}: waiting for the disk", "training stands still", "s", seconds)
    session.say(f"{case}: waiting for the disk: {seconds:.2f} s")


def _in_background(session: Session, case: str, step: TrainStep, undisturbed_ms: float, folder: Path) -> float:
    """Rows of saves in the background; seconds until the disk had one."""
    saver = _Saver(session, step.model, step.optimizer, folder / "background", is_async=True)
    reserved_s = session.largest(_seconds(saver.reserve))
    case = f"{case}: in the background"
    still, written = [], []
    for _ in range(_NUM_SAVES):
        began = time.perf_counter()
        still.append(saver.save())
        meanwhile = session.time_step(step, warmup=0, timed=4)
        saver.store.wait()
        written.append(session.largest(time.perf_counter() - began))
        if written[-1] > _MOST_S:
            break
    session.record.add(case, "training stands still", "s", still[-1], min(still), max(still))
    session.record.add(case, "until it is on the disk", "s", written[-1])
    session.record.add(case, "taking the memory of the copies, once", "s", reserved_s)
    session.record.add(case, "step meanwhile", "ms", meanwhile.ms, peer="step undisturbed", peer_value=undisturbed_ms)
    session.say(
        f"{case}: {', '.join(f'{s:.3f}' for s in still)} s; on the disk after {written[-1]:.1f} s; memory taken in "
        f"{reserved_s:.1f} s; a step meanwhile {meanwhile.ms:.1f} ms, undisturbed {undisturbed_ms:.1f}"
    )
    return written[-1]


class _Saver:
    """Checkpoints of a run in a folder of their own, of which one stays."""

    def __init__(
        self, session: Session, model: Decoder, optimizer: MasterAdamW, folder: Path, *, is_async: bool
    ) -> None:
        self.session, self.model, self.optimizer, self.number = session, model, optimizer, 0
        self.folder, self.is_async = folder, is_async
        self.store = CheckpointStore(folder, 1, session.mesh, is_async=is_async)

    def reserve(self) -> None:
        """Take the memory of the copies."""
        self.store.reserve(trainer_state(self.model, self.optimizer), ModelExport(self.model))
        self.store.wait()

    def save(self) -> float:
        """Save; seconds until the slowest rank may go on."""
        _remove(self.session, self.folder)  # the disk may not have room for two
        self.number += 1
        state, export = trainer_state(self.model, self.optimizer), ModelExport(self.model)
        return self.session.largest(_seconds(lambda: self.store.save({"step": self.number}, state, export)))


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
    wanted = {name: local(tensor).clone() for name, tensor in trainer_state(model, optimizer).items()}
    saver.save()
    step()
    saver.store.wait()
    found = saver.store.find_latest()
    assert found is not None, "it was saved"
    like = trainer_state(*build_training(small, config))
    read = found.load_state(like)

    def compare() -> None:
        assert read.keys() == wanted.keys(), "every tensor was read"
        for name, tensor in wanted.items():
            assert_bitwise(local(read[name]), tensor, f"{name} of a checkpoint")

    session.check(compare)
