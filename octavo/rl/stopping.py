"""A signal before a run's first step, when there is nothing to save; later ones see octavo.run.stopping."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from octavo.run.stopping import exit_code

_ENDS_THE_PROCESS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StoppedBeforeStepError(KeyboardInterrupt):
    """SIGINT or SIGTERM came while a run was being set up or warmed up, so that nothing was saved.

    Attributes:
        number: the signal. exit_code: what a shell gives to a process that it ends.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name} before a step was made")
        self.number = number
        self.exit_code = exit_code(number.name)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into StoppedBeforeStepError while the block runs.

    A handler that is not Python's own stays, and so does a signal that is ignored. Outside the main thread, where
    Python takes no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = {number: own for number, own in _ENDS_THE_PROCESS.items() if signal.getsignal(number) == own}

    def handle(number: int, frame: FrameType | None) -> None:
        raise StoppedBeforeStepError(signal.Signals(number))

    for number in replaced:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
