"""RankWatch: a thread of the first rank that sees another one end or hang, whatever the first one waits in."""

import contextlib
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from octavo.serve.engine.request import LostRankError

# between two looks
_LOOK_S = 0.2
# time for a call under way to end by itself, and for what clients are told to reach them
_GRACE_S, FLUSH_S = 5.0, 2.0
# of a process whose call will never end
EXIT_CODE = 70

OnLost = Callable[[LostRankError, bool], None]

logger = logging.getLogger(__name__)


class RankWatch:
    """Watches the processes of ranks 1 to N - 1 and the calls that this process makes with them.

    A call that a lost rank keeps from ever ending, a GPU's kernel that waits for its message, cannot be interrupted:
    5 s later this process ends with exit code 70. Between calls it goes on.

    Args:
        processes: of the ranks.
        is_closing: set when they are ended on purpose.
        is_gpu: they compute on GPUs. On a CPU a call fails by itself, at the latest when it meets the lost rank.

    Attributes:
        error: what was seen; None while all is well.
        limit_s: age of a call from which on the ranks count as hung, and are ended; None for no limit.
        on_lost: told of the error, at once with False, and with True before a process ends whose call does not.
    """

    def __init__(self, processes: list["subprocess.Popen[bytes]"], is_closing: threading.Event, is_gpu: bool) -> None:
        self.error: LostRankError | None = None
        self.limit_s: float | None = None
        self.on_lost: OnLost = lambda error, is_stuck: None
        self._processes, self._is_closing, self._is_gpu = processes, is_closing, is_gpu
        self._call: tuple[str, float] | None = None

    def start(self) -> None:
        """Start the thread, which ends with is_closing."""
        threading.Thread(target=self._watch, name="octavo-rank-watch", daemon=True).start()

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Within, this process waits for the others.

        Raises:
            LostRankError: one was lost before.
        """
        if self.error is not None:
            raise self.error
        self._call = name, time.monotonic()
        try:
            yield
        finally:
            self._call = None

    def find_ended(self) -> LostRankError | None:
        """What there is to say of the first rank whose process has ended."""
        if self.error is None:
            for rank, process in enumerate(self._processes, 1):
                if (code := process.poll()) is not None:
                    return LostRankError(f"{_name(rank, process)} {how_ended(code)}{_ADVICE}")
        return self.error

    def end_silent(self, error: BaseException) -> LostRankError:
        """End the ranks, of which one does not answer though none has ended; what there is to say."""
        return self._end_for(f"did not answer: {plain(error)}{_ADVICE}")

    def end_with_server(self) -> None:
        """End the ranks of a server that ends, though a call waits for one of them."""
        self._end_for("did not answer, and was ended with the server")

    def _end_for(self, reason: str) -> LostRankError:
        self.error = LostRankError(f"{self._hung_names()} {reason}")
        self._kill()
        return self.error

    def _watch(self) -> None:
        while not self._is_closing.wait(_LOOK_S):
            if (error := self.find_ended() or self._find_hung()) is not None:
                break
        else:
            return
        self.error = error
        logger.error("%s", error)
        self.on_lost(error, False)
        self._kill()  # without all of them the others compute nothing
        self._end_if_stuck(error)

    def _find_hung(self) -> LostRankError | None:
        if self._call is None or self.limit_s is None or time.monotonic() - self._call[1] < self.limit_s:
            return None
        age = f"at {self._call[0]!r} within {self.limit_s:g} s"
        return LostRankError(f"{self._hung_names()} did not answer {age}, and was ended{_ADVICE}")

    def _hung_names(self) -> str:
        """The ranks that a signal holds; all, where none is seen to be the one that hangs."""
        ranks = [*enumerate(self._processes, 1)]
        return ", ".join(_name(*each) for each in [each for each in ranks if _is_stopped(each[1])] or ranks)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)

    def _end_if_stuck(self, error: LostRankError) -> None:
        deadline = time.monotonic() + _GRACE_S
        while self._call is not None and not self._is_closing.wait(0.05):
            if time.monotonic() > deadline:
                self.on_lost(error, True)
                if self._is_gpu:
                    logger.error("a kernel waits for that rank for ever, so this process ends, with code %d", EXIT_CODE)
                    self._is_closing.wait(FLUSH_S)
                    os._exit(EXIT_CODE)
                return


_ADVICE = "; all requests ended with it: make a new LLM, or restart the server (a router restarts its replicas)"


def how_ended(code: int) -> str:
    """In words, a process's exit code."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def plain(error: BaseException) -> str:
    """An error's text without the place in torch's sources that gloo puts before it."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error)).partition("\n")[0]


def _name(rank: int, process: "subprocess.Popen[bytes]") -> str:
    return f"tensor-parallel rank {rank} (process {process.pid})"


def _is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a signal or a debugger holds a process; False where the system does not say."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state in "tT"
    return False
