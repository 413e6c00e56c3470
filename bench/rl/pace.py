"""Steps of a workload as far as the time limit lets them be."""

import time
from collections.abc import Iterator


def paced_steps(num_warm_up: int, num_timed: int, deadline: float) -> Iterator[tuple[int, bool]]:
    """(number from 1, whether it is timed) of each step; none that would end late if it took as long as the last one.

    Args:
        deadline: time.perf_counter() at which to be done.
    """
    last_s = 0.0
    for number in range(1, num_warm_up + num_timed + 1):
        began = time.perf_counter()
        if began + last_s > deadline:
            return
        yield number, number > num_warm_up
        last_s = time.perf_counter() - began
