"""Says which rank keeps the others waiting, and where: a collective that times out knows neither."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_PLACE, _COLLECTIVE = "octavo/at/", "octavo/in/"  # and a rank


class Watchdog:
    """Notes where this rank is, for all to see, and looks in a thread whether one has stopped coming along.

    A rank is late once it has not moved for a while and others are further on, or wait in a collective at the same
    place while it does not or gives no sign of life. The first rank that is not late says so, once for each place: in
    time, before the backend's own timeout ends the job.

    Args:
        store: torch's key-value store of the job; a clone of it, for a collective may hold the other.
        rank: this one's.
        world_size: number of ranks.
        patience_s: seconds without a move after which a rank counts as late.
        report: takes the message; standard error by default.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, patience_s: float, report: Callable[[str], None] | None = None
    ) -> None:
        self._store, self._rank, self._world_size, self._patience_s = store, rank, world_size, patience_s
        self._report = report or (lambda text: print(text, file=sys.stderr, flush=True))
        self._place, self._num_moves = "the start", 0
        self._seen: dict[int, tuple[int, str, float]] = {}  # rank -> moves, place, when this rank first saw it
        self._signs: dict[int, tuple[str, float]] = {}  # rank -> its last sign of life, when this rank first saw it
        self._interval_s = min(patience_s / 4, 5.0)
        self._said: set[tuple[int, int]] = set()
        self._ends = threading.Event()
        self.at(self._place)
        # no daemon: one that the interpreter's end meets inside the store's C++ would abort the process
        self._thread = threading.Thread(target=self._watch, name="octavo-watchdog")
        threading._register_atexit(self._ends.set)  # type: ignore[attr-defined]
        self._thread.start()

    def at(self, place: str) -> None:
        """This rank has come to a place, such as "step 3: backward"; all ranks come to the same ones in turn."""
        self._num_moves += 1
        self._store.set(f"{_PLACE}{self._rank}", f"{self._num_moves} {place}")

    def close(self) -> None:
        """Look no more."""
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        num_signs = 0
        while not self._ends.wait(self._interval_s):
            num_signs += 1
            try:
                self._store.set(f"{_COLLECTIVE}{self._rank}", f"{num_signs} {_collective_of_main_thread()}")
                message = self.look(time.monotonic())
            except RuntimeError:  # the store has gone with its rank: the job ends
                return
            if message is not None:
                self._report(message)

    def look(self, now: float) -> str | None:
        """What there is to say about late ranks, if it is this rank that says it and has not yet."""
        waits_in = {}
        for rank in range(self._world_size):
            moves, _, place = self._read(_PLACE, rank).partition(" ")
            if moves and (rank not in self._seen or self._seen[rank][0] != int(moves)):
                self._seen[rank] = (int(moves), place, now)
            sign = self._read(_COLLECTIVE, rank)
            if rank not in self._signs or self._signs[rank][0] != sign:
                self._signs[rank] = (sign, now)
            # a process that is stopped says for ever what it did last
            is_alive = now - self._signs[rank][1] < 3 * self._interval_s
            waits_in[rank] = sign.partition(" ")[2] if is_alive else ""
        if len(self._seen) < self._world_size:
            return None  # some rank has not begun; the rendezvous has a timeout of its own
        furthest = max(moves for moves, _, _ in self._seen.values())
        first_wait = next(
            (rank for rank, (moves, *_) in self._seen.items() if moves == furthest and waits_in[rank]), None
        )
        late = [
            rank
            for rank, (moves, _, since) in self._seen.items()
            if now - since > self._patience_s and (moves < furthest or (first_wait is not None and not waits_in[rank]))
        ]
        speaker = next((rank for rank in range(self._world_size) if rank not in late), None)
        if not late or speaker != self._rank or (late[0], self._seen[late[0]][0]) in self._said:
            return None
        self._said.add((late[0], self._seen[late[0]][0]))
        _, place, since = self._seen[late[0]]
        waiting = ", ".join(str(rank) for rank in self._seen if rank not in late)
        collective = f" ({waits_in[speaker]})" if waits_in[speaker] else ""
        return (
            f"octavo: rank {late[0]} has not moved for {now - since:.0f} s since {place!r}; waiting for it in "
            f"{self._seen[speaker][1]!r}{collective}: rank {waiting}. Look at that "
            "process: it hangs, is stopped or very slow"
        )

    def _read(self, key: str, rank: int) -> str:
        """What a rank has noted; empty before it has."""
        name = f"{key}{rank}"
        return self._store.get(name).decode() if self._store.check([name]) else ""


def _collective_of_main_thread() -> str:
    """The name of the torch.distributed call that the main thread waits in; empty where it is in none.

    NCCL's are launched and not waited for: there the ranks that wait are further on.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = ""
    while frame is not None:
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name
