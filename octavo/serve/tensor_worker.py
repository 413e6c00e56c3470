"""A tensor-parallel worker: `python -m octavo.serve.tensor_worker FD FD RANK PORT PARENT`; tensor_workers.py starts it.

It builds the engine that the first rank builds and repeats its calls until the first rank hangs up or is gone. Calls
come over one connection, new weights over the other (tensor_updates.py).
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from octavo.distributed import local_job
from octavo.distributed.agreement import check_versions
from octavo.errors import LostWeightsError, OctavoError
from octavo.serve.engine import Engine
from octavo.serve.engine.request import RequestState
from octavo.serve.rank_watch import plain
from octavo.serve.tensor_updates import UpdateFollower
from octavo.serve.tensor_workers import EngineOrder, rank_device

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Load, say so, join the others, repeat."""
    fd, updates_fd, rank, port, parent = map(int, arguments)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 drains, and then hangs up
    threading.Thread(target=follow, args=(parent,), daemon=True).start()
    calls = Connection(fd)
    try:
        (versions,) = calls.recv()
        check_versions("rank 0", versions, f"rank {rank}")  # before an order that only the same version can read
        (order,) = calls.recv()
        engine, updates = build(order, rank, port, lambda: calls.send(("loaded", "")))
    except OctavoError as error:  # rank 0 says it, or has failed alike and hung up
        with contextlib.suppress(OSError):
            calls.send(("failed", str(error)))
        sys.exit(1)
    except Exception as error:
        with contextlib.suppress(OSError):
            calls.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    thread = threading.Thread(target=updates.run, args=(Connection(updates_fd),), daemon=True)
    thread.start()
    try:
        Repeater(engine, updates).run(calls)
    except RuntimeError as error:  # of a collective
        if os.getppid() == parent:
            raise
        sys.exit(f"tensor-parallel rank {rank} ends: the first rank is gone ({plain(error)})")
    thread.join()  # the first rank hangs up on both


def build(order: EngineOrder, rank: int, port: int, on_loaded: Any) -> tuple[Engine, UpdateFollower]:
    """This rank's engine, and what brings it new weights."""
    model, tokenizer = order.load(rank)
    on_loaded()
    local_job.join(local_job.connect(port), rank, order.parallel.size, order.device(rank))
    updates = UpdateFollower(model, local_job.new_host_group(), lambda device: rank_device(device, rank))
    return Engine(model, tokenizer, order.config, order.eos_ids), updates


class Repeater:
    """Does to an engine what rank 0 does to its own."""

    def __init__(self, engine: Engine, updates: UpdateFollower) -> None:
        self._engine, self._updates = engine, updates
        self._requests: dict[int, RequestState] = {}

    def run(self, calls: Connection) -> None:
        """Until rank 0 hangs up.

        Raises:
            LostWeightsError: this rank's weights are gone; rank 0 may still have its own, and learns of it by the end.
        """
        while True:
            try:
                name, *arguments = calls.recv()
            except (EOFError, OSError):
                return
            try:
                self._repeat(name, arguments)
            except LostWeightsError:
                raise
            except OctavoError as error:  # rank 0 has raised the same
                logger.info("%s: %s", name, error)

    def _repeat(self, name: str, arguments: list[Any]) -> None:
        engine = self._engine
        if name == "admit":
            prompt_ids, params, prompt, keep_text = arguments
            request = engine.admit(RequestState(engine.make_input(prompt_ids, params, prompt)), keep_text)
            assert request.request_id is not None, "it was admitted"
            self._requests[request.request_id] = request
        elif name == "abort":
            if (unfinished := self._requests.pop(arguments[0], None)) is not None:
                engine.abort(unfinished)
        elif name == "commit_update":
            assert self._updates.update is not None, "it was verified"
            engine.commit_update(self._updates.update, *arguments)
        else:
            getattr(engine, name)(*arguments)
            if name == "step":
                self._requests = {i: each for i, each in self._requests.items() if not each.is_finished}


def follow(parent: int) -> None:
    """End with the process that started this one, also while another thread waits in a collective."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
