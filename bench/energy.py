"""Joules that the GPU draws while a block runs: NVML's energy counter, else power sampled in a thread.

Where the machine tells neither, the reading has no joules and says why; a benchmark then prints "not measured".
"""

import contextlib
import dataclasses
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from octavo.run.energy import energy_counter, gpu_uuid

_SAMPLE_S = 0.02
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")


@dataclasses.dataclass
class EnergyReading:
    """joules of a block once it ended, None where nothing could be read; source says how or why not."""

    joules: float | None = None
    source: str = "not measured"


@contextlib.contextmanager
def measure_energy(device: str, *, sample_s: float = _SAMPLE_S) -> Iterator[EnergyReading]:
    """Fill a reading with what the GPU drew inside the block; the GPU's work must end inside it too.

    Args:
        sample_s: between two samples where there is no counter; each starts a process.
    """
    reading = EnergyReading()
    if device != "cuda":
        reading.source = "not measured: no GPU"
        yield reading
        return
    counter, reading.source = energy_counter(device)
    if counter is not None:
        start = counter()
        yield reading
        reading.joules = counter() - start
        return
    with _Sampler(_read_nvidia_smi, sample_s) as sampler:
        yield reading
    reading.joules = sampler.joules()
    if reading.joules is not None:
        reading.source = "nvidia-smi power samples"


class _Sampler:
    """Reads watts in a thread and integrates them over time."""

    def __init__(self, read_watts: Callable[[], float | None], sample_s: float = _SAMPLE_S) -> None:
        self._read_watts, self._sample_s = read_watts, sample_s
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            watts = self._read_watts()
            if watts is None:
                return
            self._samples.append((time.perf_counter(), watts))
            if self._ended.wait(self._sample_s):
                return

    def joules(self) -> float | None:
        """Trapezoids between samples; None for fewer than two."""
        if len(self._samples) < 2:
            return None
        pairs = zip(self._samples[:-1], self._samples[1:], strict=True)
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs)


def _read_nvidia_smi() -> float | None:
    command = [*_NVIDIA_SMI, f"--id={gpu_uuid('cuda')}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
