"""The SM clock and the power while a block runs: a card at its power cap is slower than its ceilings say."""

import contextlib
import statistics
import subprocess
from collections.abc import Iterator

from octavo.run.energy import gpu_uuid

_QUERY = "clocks.sm,power.draw,clocks_throttle_reasons.sw_power_cap"


@contextlib.contextmanager
def sample_clocks(device: str) -> Iterator[dict[str, float]]:
    """Fill a dict with figures of clock and power; it stays empty on a CPU and without nvidia-smi, which says so.

    nvidia-smi samples every 50 ms in a process of its own: a thread would take time from the steps' Python.
    """
    figures: dict[str, float] = {}
    if device != "cuda":
        yield figures
        return
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "--loop-ms=50"]
    try:
        process = subprocess.Popen([*command, f"--id={gpu_uuid(device)}"], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        print(f"clock and power: not measured: {error}")
        yield figures
        return
    try:
        yield figures
    finally:
        process.terminate()
        figures |= figures_of(process.communicate()[0])


def figures_of(samples: str) -> dict[str, float]:
    """Figures of nvidia-smi's lines "MHz, W, Active or Not Active"; empty where no line is whole."""
    rows = [row for line in samples.splitlines() if len(row := line.split(", ")) == 3 and row[0].isdigit()]
    if not rows:
        return {}
    mhz, watts = [float(row[0]) for row in rows], [float(row[1]) for row in rows]
    found = {"SM clock, MHz": statistics.median(mhz), "SM clock, lowest": min(mhz)}
    found |= {"power, W": statistics.median(watts), "power, highest": max(watts)}
    return found | {"share of the time at the power cap": sum(row[2] == "Active" for row in rows) / len(rows)}
