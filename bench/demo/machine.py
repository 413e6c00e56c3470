"""Facts of the machine and the software that a report's numbers belong to."""

import platform
from pathlib import Path

import torch

import octavo
from bench.demo.workers import num_cores


def machine_facts(device: str) -> dict[str, str]:
    """Name -> value, for people."""
    facts = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
        "processor": _processor(),
        "cores": str(num_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "octavo": octavo.__version__,
    }
    return facts


def _processor() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
