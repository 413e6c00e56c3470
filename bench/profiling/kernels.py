"""What a device ran, read from torch's profiler: kernels, copies and fills, and when none of them was at work."""

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bench.timing import synchronize

# Categories of a trace's events. A CPU has operators instead, which contain each other: its sums count some time twice.
_WORK = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
Spans = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a device ran: its name, its stream, microseconds of its start and its end."""

    name: str
    stream: int
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclasses.dataclass
class Watched:
    """What ran in a block once it ended, in the order of the starts, and the block's wall time."""

    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    wall_us: float = 0.0


@contextlib.contextmanager
def watch(device: str) -> Iterator[Watched]:
    """Profile a block, whose work is awaited at both ends. Reading what ran comes after it and is not in its time."""
    found = Watched()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[activity]) as profiler:
            synchronize(device)
            began = time.perf_counter()
            yield found
            synchronize(device)
            found.wall_us = (time.perf_counter() - began) * 1e6
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found.kernels = read_kernels(path, device)


def read_kernels(path: Path, device: str = "cuda") -> list[Kernel]:
    """The device's work in a Chrome trace that torch's profiler has written, in the order of the starts."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [
        Kernel(event["name"], int(event.get("args", {}).get("stream", 0)), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in _WORK[device]
    ]
    return sorted(found, key=lambda kernel: kernel.start_us)


def busy_spans(kernels: Iterable[Kernel]) -> Spans:
    """When at least one of them ran, on any stream."""
    return join_spans(sorted((kernel.start_us, kernel.end_us) for kernel in kernels), 0.0)


def join_spans(spans: Spans, gap_us: float) -> Spans:
    """Sorted spans without overlaps; gaps up to gap_us are closed."""
    found: Spans = []
    for start, end in spans:
        if found and start <= found[-1][1] + gap_us:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
