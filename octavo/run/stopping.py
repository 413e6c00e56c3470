"""A run that is asked to stop (SIGTERM, Ctrl-C) finishes its step, saves and leaves; before its first step it ends."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ENDS_THE_PROCESS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopRequest:
    """Whether a stop was asked for; `reason` is the signal's name."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is not None


class StoppedBeforeStepError(KeyboardInterrupt):
    """SIGINT or SIGTERM came while a run was being set up or warmed up, so that nothing was saved.

    Attributes:
        number: the signal.
        exit_code: what a shell gives to a process that it ends.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name} before a step was made")
        self.number = number
        self.exit_code = exit_code(number.name)


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
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def handle(number: int, frame: FrameType | None) -> None:
        request.reason = signal.Signals(number).name
        signal.signal(number, previous[signal.Signals(number)])

    with _handled_by(handle, previous):
        yield request


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into StoppedBeforeStepError while the block runs.

    A handler that is not Python's own stays, and so does a signal that is ignored. Outside the main thread, where
    Python takes no signals, nothing changes.
    """
    previous = {number: own for number, own in _ENDS_THE_PROCESS.items() if signal.getsignal(number) == own}

    def handle(number: int, frame: FrameType | None) -> None:
        raise StoppedBeforeStepError(signal.Signals(number))

    with _handled_by(handle, previous):
        yield


@contextmanager
def _handled_by(
    handle: Callable[[int, FrameType | None], None], previous: Mapping[signal.Signals, Any]
) -> Iterator[None]:
    """Within, in the main thread, these signals go to `handle`; their previous handlers are put back at the end."""
    is_main = threading.current_thread() is threading.main_thread()
    for number in previous if is_main else ():
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items() if is_main else ():
            signal.signal(number, handler)
