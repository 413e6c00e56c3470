"""Two ways to time a call beside testing.bench's: with the CPU's share, and without, from a CUDA graph."""

import math
import time
from collections.abc import Callable, Mapping

import torch

from bench.record import Timing, summarize

# A training step's linears follow one another, so what is timed is a run of calls that is long beside the few first
# ones, which find the CPU's caches full of another variant's code and data.
_BURST_S = 0.04
_FEWEST_CALLS, _MOST_CALLS = 10, 60  # a burst
_CALLS_BEFORE = 5  # of each burst, untimed


def time_back_to_back(
    calls: Mapping[str, Callable[[], object]], *, bursts: int, device: str, burst: int | None = None
) -> dict[str, Timing]:
    """Wall time of a call among others of its kind, issued without waiting, bursts of each in turn.

    Args:
        bursts: of each call.
        burst: calls in one, of every variant alike; None: as many as the quickest makes in 40 ms, from 10 to 60.
    Returns:
        name -> Timing of one call, over the bursts.
    """
    if burst is None:
        quickest = min((_time_burst(call, _CALLS_BEFORE, device) for call in calls.values()), default=_BURST_S)
        burst = min(max(math.ceil(_BURST_S / quickest), _FEWEST_CALLS), _MOST_CALLS)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(bursts):
        for name, call in calls.items():
            samples[name].append(_time_burst(call, burst, device) * 1e6)
    return {name: summarize(times) for name, times in samples.items()}


def _time_burst(call: Callable[[], object], num_calls: int, device: str) -> float:
    """Seconds a call."""
    for _ in range(_CALLS_BEFORE):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / num_calls


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """Record a call in a CUDA graph and return what replays it; inputs and outputs stay where they are.

    Raises:
        RuntimeError: torch's, where the call does what no graph can hold (a copy from the CPU, a wait).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def synchronize(device: torch.device | str) -> None:
    """Wait for the GPU, where the device is one."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
