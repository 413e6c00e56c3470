"""The SM clock and the power while a block runs: a card at its power cap is slower than its ceilings say."""

import contextlib
import dataclasses
import statistics
import subprocess
from collections.abc import Iterator, Sequence

from bench.record import Record, summarize
from octavo.run.energy import gpu_uuid

_QUERY = "clocks.sm,power.draw,clocks_throttle_reasons.sw_power_cap"


@dataclasses.dataclass
class ClockSamples:
    """What nvidia-smi said during a block, a sample every 50 ms; empty on a CPU and without nvidia-smi.

    Attributes:
        mhz: SM clock.
        watts: power.
        is_capped: whether the power cap held the clock down.
    """

    mhz: list[float] = dataclasses.field(default_factory=list)
    watts: list[float] = dataclasses.field(default_factory=list)
    is_capped: list[bool] = dataclasses.field(default_factory=list)

    def read(self, text: str) -> None:
        """Add nvidia-smi's lines "MHz, W, Active or Not Active", whole ones."""
        rows = [row for line in text.splitlines() if len(row := line.split(", ")) == 3 and row[0].isdigit()]
        self.mhz += [float(row[0]) for row in rows]
        self.watts += [float(row[1]) for row in rows]
        self.is_capped += [row[2] == "Active" for row in rows]

    def figures(self) -> dict[str, float]:
        """Figures of clock and power by name."""
        if not self.mhz:
            return {}
        found = {"SM clock, MHz": statistics.median(self.mhz), "SM clock, lowest": min(self.mhz)}
        found |= {"power, W": statistics.median(self.watts), "power, highest": max(self.watts)}
        return found | {"share of the time at the power cap": sum(self.is_capped) / len(self.is_capped)}


def add_clocks(record: Record, case: str, blocks: Sequence[ClockSamples]) -> None:
    """Rows of the clock and the power over all blocks of a case, where they were sampled."""
    for metric, unit, samples in (
        ("SM clock", "MHz", [mhz for block in blocks for mhz in block.mhz]),
        ("power", "W", [watts for block in blocks for watts in block.watts]),
    ):
        if samples:
            spread = summarize(samples)
            record.add(case, metric, unit, spread.median_us, spread.p20_us, spread.p80_us)


@contextlib.contextmanager
def sample_clocks(device: str) -> Iterator[ClockSamples]:
    """Sample while a block runs, in a process of its own: a thread would take time from the steps' Python."""
    samples = ClockSamples()
    if device != "cuda":
        yield samples
        return
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "--loop-ms=50"]
    try:
        process = subprocess.Popen([*command, f"--id={gpu_uuid(device)}"], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        print(f"clock and power: not measured: {error}")
        yield samples
        return
    try:
        yield samples
    finally:
        process.terminate()
        samples.read(process.communicate()[0])
