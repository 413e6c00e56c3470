"""A run that is asked to stop (SIGTERM, Ctrl-C) finishes its step, saves and leaves."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether somebody asked; `reason` is the signal's name."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is not None


def exit_code(reason: str) -> int:
    """What a shell gives to a process that a signal ends: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signal.Signals[reason]


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into a request while the block runs; the same signal again acts as it always does.

    A signal that is ignored stays so (SIGINT in a background job of a shell script). Outside the main thread, where
    Python takes no signals, the request is never set.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def handle(number: int, frame: FrameType | None) -> None:
        request.reason = signal.Signals(number).name
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
