"""The watchdog names a rank that does not come along, once, from one process."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.distributed.watchdog import Watchdog
from tests.ranks import run_ranks


def of(rank: int, store: Any, said: list[str]) -> Watchdog:
    """One whose thread stays out of the way: the test looks itself."""
    return Watchdog(store, rank, 3, 1000.0, said.append)


def test_the_late_rank_is_named_once_by_the_first_that_is_not() -> None:
    store: Any = dist.HashStore()
    said: list[str] = []
    dogs = [of(rank, store, said) for rank in range(3)]
    began = time.monotonic()
    for dog in dogs:
        dog._patience_s = 10.0
        dog.at("step 1: forward")
    assert [dog.look(began) for dog in dogs] == [None] * 3
    dogs[0].at("step 1: backward")
    dogs[2].at("step 1: backward")
    assert [dog.look(began + 9) for dog in dogs] == [None] * 3
    found = [dog.look(began + 11) for dog in dogs]
    assert found[1:] == [None, None]
    assert found[0] is not None
    assert "rank 1 has not moved for 11 s since 'step 1: forward'" in found[0]
    assert "waiting for it in 'step 1: backward': rank 0, 2" in found[0]
    assert [dog.look(began + 12) for dog in dogs] == [None] * 3  # said once
    dogs[1].at("step 1: backward")
    assert [dog.look(began + 40) for dog in dogs] == [None] * 3  # all have come; nobody is late
    for dog in dogs:
        dog.close()
    assert said == []


def test_who_is_in_no_collective_where_the_others_wait_is_late() -> None:
    store: Any = dist.HashStore()
    dogs = [of(rank, store, []) for rank in range(3)]
    for rank, dog in enumerate(dogs):
        dog._patience_s = 10.0
        dog.at("step 1: backward")
        store.set(f"octavo/in/{rank}", "1 " if rank == 0 else "1 all_gather_single")
    began = time.monotonic()
    assert [dog.look(began) for dog in dogs] == [None] * 3
    found = [dog.look(began + 11) for dog in dogs]
    assert found[0] is None and found[2] is None and found[1] is not None
    assert "rank 0 has not moved for 11 s since 'step 1: backward'" in found[1]
    assert "waiting for it in 'step 1: backward' (all_gather_single): rank 1, 2" in found[1]
    for dog in dogs:
        dog.close()


def test_nothing_is_said_before_all_have_begun() -> None:
    store: Any = dist.HashStore()
    dog = of(0, store, [])
    dog.at("step 1: forward")
    assert dog.look(time.monotonic() + 1e6) is None
    dog.close()


def late_rank(rank: int, folder: str) -> None:
    """Rank 1 is slow once, then it stops itself, as a hung process does, and the other ends within the timeout."""
    if rank == 1:
        Path(folder, "pid").write_text(str(os.getpid()))
    mesh = Mesh.from_config(ParallelSection(timeout_s=4), "cpu")
    said: list[str] = []
    assert mesh.watchdog is not None
    mesh.watchdog._report = said.append
    mesh.at("step 1: forward")
    mesh.barrier()
    if rank == 1:
        time.sleep(3.0)
    else:
        mesh.at("step 1: backward")
    mesh.barrier()
    num_said = len(said)
    mesh.at("step 2: backward")
    mesh.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    mesh.at("step 2: gradient norm")
    began = time.monotonic()
    with pytest.raises(RuntimeError):  # gloo's own, which names nobody
        dist.all_reduce(torch.zeros(1))
    found = {"slow": said[:num_said], "hung": said[num_said:], "waited": time.monotonic() - began}
    Path(folder, "0.json").write_text(json.dumps(found))
    os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)


def test_a_slow_rank_and_a_hung_one_are_named_before_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        run_ranks(late_rank, 2, str(tmp_path), alone=True)
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["waited"] < 10.0
    for said, place in ((found["slow"], "step 1: forward"), (found["hung"], "step 2: backward")):
        assert len(said) == 1 and "rank 1 has not moved" in said[0] and f"'{place}'" in said[0]
