"""One step's kernels by torch's profiler: how much of the collectives runs beside compute, in figures and a picture.

`bench.speed.fsdp --trace` calls it. Compute is what runs on the stream with the most kernel time that is no
collective's; a collective's time includes the wait for the slowest rank.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bench.profiling.kernels import Kernel, Spans, busy_spans, join_spans

# by what a kernel's name holds; copies between GPUs are collectives by copy engines
_COLLECTIVES = {
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "AllReduce": "all-reduce",
    "SendRecv": "all-to-all",
    "Memcpy PtoP": "peer copies",
}
_TOP = 15
_COLORS = {"compute": "#30507a", "all-gather": "#c2410c", "reduce-scatter": "#047857"}
_WIDTH, _ROW, _LABEL = 960, 34, 120  # pixels


@dataclasses.dataclass(frozen=True)
class Overlap:
    """One collective's kernels of a step.

    Attributes:
        ms: that they ran.
        exposed_ms: of these, when no kernel ran on the compute stream.
    """

    ms: float
    exposed_ms: float

    @property
    def share(self) -> float:
        """Of its time that ran beside compute."""
        return 1 - self.exposed_ms / self.ms


class Timeline:
    """The kernels of one step on one GPU."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        assert kernels, "a step launches kernels"
        self.kernels = kernels
        times: collections.Counter[int] = collections.Counter()
        for kernel in kernels:
            times[kernel.stream] += 0 if _kind(kernel) else kernel.us  # type: ignore[assignment]
        self.stream = max(times, key=times.__getitem__)
        self.start_us = min(kernel.start_us for kernel in kernels)
        self.span_ms = (max(kernel.end_us for kernel in kernels) - self.start_us) / 1e3
        self.compute = busy_spans(k for k in kernels if k.stream == self.stream and not _kind(k))

    def of(self, kind: str) -> Spans:
        """When a collective ran."""
        return busy_spans(kernel for kernel in self.kernels if _kind(kernel) == kind)

    def overlaps(self) -> dict[str, Overlap]:
        """By collective, those that ran."""
        spans = {kind: self.of(kind) for kind in _COLLECTIVES.values()}
        return {
            kind: Overlap(_ms(found), _ms(found) - _ms(_both(found, self.compute)))
            for kind, found in spans.items()
            if found
        }

    @property
    def idle_ms(self) -> float:
        """From the step's first kernel to its last, when the compute stream had none."""
        return self.span_ms - _ms(self.compute)

    @property
    def empty_ms(self) -> float:
        """Of these, when no stream had one: the GPU waited for the host."""
        return self.span_ms - _ms(busy_spans(self.kernels))

    def describe(self) -> str:
        """The kernels that took longest, and where time went."""
        times: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        for kernel in self.kernels:
            times[kernel.name] += kernel.us  # type: ignore[assignment]
            counts[kernel.name] += 1
        lines = [f"{time / 1e3:9.3f} ms {counts[name]:5} x {name[:110]}" for name, time in times.most_common(_TOP)]
        beside = [k for k in self.kernels if k.stream != self.stream and not _kind(k)]
        lines += [
            f"{len(self.kernels)} kernels in {self.span_ms:.2f} ms; compute stream busy {_ms(self.compute):.2f}, idle "
            f"{self.idle_ms:.2f}, of which no stream had work {self.empty_ms:.2f}; kernels of other streams that are "
            f"no collective {_ms(busy_spans(beside)):.2f}"
        ]
        for kind, one in self.overlaps().items():
            lines.append(f"{kind}: {one.ms:.2f} ms, {one.share:.0%} beside compute, {one.exposed_ms:.2f} ms exposed")
        return "\n".join(lines)

    def draw(self, path: Path, title: str) -> None:
        """A picture: when compute and the collectives ran."""
        scale = (_WIDTH - _LABEL - 10) / (self.span_ms * 1e3)
        rows = {
            "compute": self.compute,
            "all-gather": self.of("all-gather"),
            "reduce-scatter": self.of("reduce-scatter"),
        }
        height = _ROW * (len(rows) + 1) + 24
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            'font-size="13">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="10" y="22" font-size="15">{title}</text>',
        ]
        for index, (name, spans) in enumerate(rows.items(), start=1):
            y = _ROW * index
            parts.append(f'<text x="10" y="{y + 18}">{name}</text>')
            bars = "".join(
                f"M{_LABEL + (start - self.start_us) * scale:.1f} {y}h{max((end - start) * scale, 0.3):.1f}v24H"
                f"{_LABEL + (start - self.start_us) * scale:.1f}z"
                for start, end in join_spans(spans, 0.5 / scale)
            )
            parts.append(f'<path d="{bars}" fill="{_COLORS[name]}"/>')
        parts.append(f'<text x="{_LABEL}" y="{height - 8}">0 ms</text>')
        parts.append(f'<text x="{_WIDTH - 10}" y="{height - 8}" text-anchor="end">{self.span_ms:.1f} ms</text></svg>')
        path.write_text("\n".join(parts) + "\n")


def trace_steps(
    wait: Callable[[], object],
    step: Callable[[], object],
    num_steps: int,
    folder: Path,
    activities: Sequence[ProfilerActivity] = (ProfilerActivity.CUDA,),
) -> list[Path]:
    """Profile so many steps one by one, after one that is thrown away; their traces.

    Args:
        wait: for the other ranks, before each and not in its trace.
        step: one training step, which ends when the GPU is done.
    """
    found = [folder / f"trace-{index}.json" for index in range(num_steps + 1)]
    for path in found:
        wait()
        with profile(activities=activities) as profiler:
            step()
        profiler.export_chrome_trace(str(path))
    return found[1:]


def trace_host(step: Callable[[], object], path: Path) -> str:
    """Profile one step with the host's share, write the whole trace (.json.gz), and list the host's longest calls."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_TOP, max_name_column_width=60)  # type: ignore[no-untyped-call]
    return str(table)


def _kind(kernel: Kernel) -> str:
    """Which collective it is of; "" for none."""
    return next((kind for text, kind in _COLLECTIVES.items() if text in kernel.name), "")


def _both(first: Spans, second: Spans) -> Spans:
    """What lies in both, each without overlaps."""
    found: Spans = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _ms(spans: Spans) -> float:
    return sum(end - start for start, end in spans) / 1e3
