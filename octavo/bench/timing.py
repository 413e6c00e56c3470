"""Two ways to time a call beside testing.bench's: with the CPU's share, and without, from a CUDA graph."""

import time
from collections.abc import Callable, Mapping

import torch

from octavo.testing.bench import Timing, summarize

_BURST = 10  # calls issued without waiting, so that the CPU runs as far ahead as it can


def time_back_to_back(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, device: str, burst: int = _BURST
) -> dict[str, Timing]:
    """Wall time of a call among others of its kind, issued without waiting, bursts of each in turn.

    Returns:
        name -> Timing of one call, over `repeats` bursts (a fifth of them where bursts are long).
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(3, repeats // 5)):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(burst):
                call()
            synchronize(device)
            samples[name].append((time.perf_counter() - start) * 1e6 / burst)
    return {name: summarize(times) for name, times in samples.items()}


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
