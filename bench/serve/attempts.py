"""Attempts: what the sessions of `octavo bench serve` and `octavo bench rl` share: each arm tried on its own."""

import math
import time
import traceback
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from bench.options import FP8_RECIPES, BenchOptions
from bench.record import Record
from bench.serve.host import EngineHost
from bench.serve.measure import OutOfTimeError
from bench.serve.results import ServeResults
from octavo.serve.model_choice import FP8_RECIPE

P = ParamSpec("P")


class Attempts:
    """One command's clock and complaints. What fails or comes too late leaves the figures of the rest alone.

    Args:
        results: where rows go. host: whose engine is freed after a failure.
        began: time.perf_counter() at the command's start. time_limit_s: from then on; None for no limit.

    Attributes:
        deadline: time.perf_counter() at which to be done. complaints: what went wrong so far.
    """

    def __init__(self, results: ServeResults, host: EngineHost, began: float, time_limit_s: float | None) -> None:
        self._results, self._host, self._began, self._time_limit_s = results, host, began, time_limit_s
        self.deadline = began + (time_limit_s or math.inf)
        self.complaints: list[str] = []

    def run(self, what: str, action: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do one thing, say when it starts and ends and how, and write what there is.

        Args:
            what: for people. action: returns what to print at its end.
        """
        self._say(f"start: {what}")
        ending = None
        try:
            if time.perf_counter() >= self.deadline:
                raise OutOfTimeError
            ending = action(*args, **kwargs)
        except OutOfTimeError:
            self._say(f"skipped, it does not fit into --time-limit {self._time_limit_s:g}: {what}")
        except Exception as error:  # the other arms' figures are worth having; the exit code is 1
            self.complaints.append(f"{what}: {type(error).__name__}: {error}")
            traceback.print_exc()
        if ending is None:
            self._host.free()  # not while an error's frames hold what is to be freed
            return
        self._results.flush()
        self._say(f"end: {what}: {ending}")

    def measure(
        self, what: str, action: Callable[Concatenate[Record, P], str], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """The same for what adds rows to a record, its first argument; of a failure none of them stay."""

        def measured() -> str:
            fresh = self._results.fresh()
            ending = action(fresh, *args, **kwargs)
            self._results.take(fresh)
            return ending

        self.run(what, measured)

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", flush=True)


def one_recipe(options: BenchOptions) -> str:
    """The recipe of arms in FP8, of which an engine has one: the first that was asked for, else serving's own."""
    return FP8_RECIPE if options.recipes == FP8_RECIPES else options.recipes[0]
