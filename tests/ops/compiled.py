"""What every op's test_compile.py holds a kernel to once it is compiled for Hopper."""

import re

from octavo.testing import tolerances
from octavo.testing.compile import CompileReport, Launch, record_launches

__all__ = ["CompileReport", "Launch", "assert_moves_16_bytes", "compiled", "record_launches"]


def compiled(launch: Launch, max_spill_bytes: int = tolerances.MAX_SPILL_BYTES) -> CompileReport:
    """What the assembler says of a launch: next to no spills, no local memory, no warning."""
    report = launch.compile()
    assert report.spill_bytes <= max_spill_bytes, f"{launch} spills {report.spill_bytes} bytes"
    assert report.stack_bytes == 0, f"{launch} keeps {report.stack_bytes} bytes of stack"
    assert not report.notes, f"{launch}: {report.notes}"
    return report


def assert_moves_16_bytes(launch: Launch, ptx: str, stored: str = r"v4\.b32") -> None:
    """Loads, and stores of the given kind, are of 16 bytes at once."""
    assert re.search(r"ld\.global[\w.:]*v4\.b32", ptx), f"{launch} loads less than 16 bytes at once"
    assert re.search(rf"st\.global[\w.:]*{stored}", ptx), f"{launch} stores less at once"
