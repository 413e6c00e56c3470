"""Timing on a GPU (or a CPU) and the records that benchmarks write, so that every peer is timed the same way.

Calls are interleaved round-robin, so that a drift of the clock hits all of them alike, and the L2 cache is emptied
before each. Feed random inputs: zeros run faster than real data.
"""

import dataclasses
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20  # past the L2 of any GPU of today
HEAD_START_CYCLES = 1_000_000  # half a millisecond in which the CPU queues the whole call


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median and the 20th and 80th percentiles."""

    median_us: float
    p20_us: float
    p80_us: float

    def divided(self, num_parts: int) -> "Timing":
        """The time of one of so many equal parts."""
        return Timing(self.median_us / num_parts, self.p20_us / num_parts, self.p80_us / num_parts)

    def rate(self, amount: float) -> tuple[float, float, float]:
        """amount per second: its median, 20th and 80th percentile."""
        return amount / self.median_us * 1e6, amount / self.p80_us * 1e6, amount / self.p20_us * 1e6


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 30,
    warmup: int = 5,
    device: str = "cuda",
    head_start_cycles: int = HEAD_START_CYCLES,
    align: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time each call `repeats` times, in turn.

    Args:
        calls: name -> a function without arguments that works on `device`.
        repeats: timed calls of each.
        warmup: calls of each before, which also compile.
        device: "cuda" (events, L2 flushed) or "cpu" (wall clock).
        head_start_cycles: for which the GPU waits before each call, so that the CPU can queue the whole of it.
        align: called before each, untimed; of collectives what lets all ranks begin one at once.
    Returns:
        name -> Timing.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    if device == "cuda":
        samples = _measure_cuda(calls, repeats, head_start_cycles, align)
    else:
        samples = _measure_cpu(calls, repeats, align)
    return {name: summarize(times) for name, times in samples.items()}


def _measure_cuda(
    calls: Mapping[str, Callable[[], object]], repeats: int, head_start_cycles: int, align: Callable[[], object]
) -> dict[str, list[float]]:
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    torch.cuda.synchronize()
    for _ in range(repeats):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            torch.cuda._sleep(head_start_cycles)  # else a short call would be timed with its launch
            align()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 for start, end in pairs] for name, pairs in events.items()}


def _measure_cpu(
    calls: Mapping[str, Callable[[], object]], repeats: int, align: Callable[[], object]
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            align()
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return samples


def summarize(times: list[float]) -> Timing:
    """Median and fifths of times in microseconds, one at least."""
    fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else [times[0]] * 4
    return Timing(statistics.median(times), fifths[0], fifths[3])


@dataclasses.dataclass
class Record:
    """One benchmark's results, written as bench/records/NAME.json.

    Args:
        name: of the file.
        what: one sentence: what was measured and how.
        device: "cuda" or "cpu".
    """

    name: str
    what: str
    device: str = "cuda"
    rows: list[dict[str, str | float | None]] = dataclasses.field(default_factory=list)

    def add(
        self,
        case: str,
        metric: str,
        unit: str,
        value: float,
        p20: float | None = None,
        p80: float | None = None,
        peer: str | None = None,
        peer_value: float | None = None,
    ) -> None:
        """Add a row; `peer` names what was measured beside it in the same run."""
        numbers = {"value": value, "p20": p20, "p80": p80, "peer_value": peer_value}
        rounded = {name: None if n is None else float(f"{n:.4g}") for name, n in numbers.items()}
        self.rows.append({"case": case, "metric": metric, "unit": unit, "peer": peer, **rounded})

    def add_times(
        self,
        case: str,
        metric: str,
        unit: str,
        timing: Timing,
        scale: float = 1.0,
        peer: str | None = None,
        peer_value: float | None = None,
    ) -> None:
        """Add a row of times: microseconds times scale, the median with its fifths; peer_value is in the row's unit."""
        times = (timing.median_us, timing.p20_us, timing.p80_us)
        median, p20, p80 = (us * scale for us in times)
        self.add(case, metric, unit, median, p20, p80, peer, peer_value)

    def add_mean(
        self,
        case: str,
        metric: str,
        unit: str,
        values: Sequence[float],
        peer: str | None = None,
        peer_value: float | None = None,
    ) -> None:
        """Add the mean over seeds, with the smallest and the largest of a seed as p20 and p80."""
        self.add(case, metric, unit, statistics.fmean(values), min(values), max(values), peer, peer_value)

    def add_ratio(self, case: str, metric: str, value: float, peer: str | None) -> None:
        """Add how many times the peer's figure this case's is."""
        self.add(case, metric, "x", value, peer=peer, peer_value=1.0)

    def add_roofline(self, case: str, share: float, peer: str = "ceilings of the same run") -> None:
        """Add the share of the least time possible in the time that was measured."""
        self.add(case, "share of the roofline", "share", share, peer=peer, peer_value=1.0)

    def document(self, commit: str | None = None) -> dict[str, Any]:
        """What is written, the machine, the libraries and the day with it.

        Args:
            commit: of the tree that was measured; None asks git, and is "unknown" where there is none.
        """
        cpu = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
        return {
            "what": self.what,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else cpu,
            "torch": torch.__version__,
            "triton": _installed_version("triton"),
            "commit": commit or git_commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "rows": self.rows,
        }

    def save(self, folder: Path, commit: str | None = None) -> Path:
        """Write the record.

        Args:
            folder: where to, made if missing.
            commit: as in document.
        Returns:
            The file's path.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.document(commit), indent=1) + "\n")
        return path


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str:
    """Short hash of HEAD, or "unknown" where there is no git."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
