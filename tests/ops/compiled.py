"""What every op's test_compile.py holds a kernel to once it is compiled for Hopper."""

import re
from collections.abc import Callable

from octavo.testing import tolerances
from octavo.testing.compile import CompileReport, Launch, record_launches

__all__ = ["CompileReport", "Launch", "assert_moves_16_bytes", "compile_all", "compiled", "launched"]


def launched(call: Callable[[], object], num: int | None = None, arch: int = 90) -> list[Launch]:
    """The different launches that a call makes: so many where `num` says it, else some."""
    with record_launches(arch) as found:
        call()
    assert found and len(found) == (num or len(found)), f"{len(found)} launches: {', '.join(map(str, found))}"
    return found


def compiled(launch: Launch, max_spill_bytes: int = tolerances.MAX_SPILL_BYTES) -> CompileReport:
    """What the assembler says of a launch: next to no spills, local memory for them alone, no warning."""
    report = launch.compile()
    assert report.spill_bytes <= max_spill_bytes, f"{launch} spills {report.spill_bytes} bytes"
    assert report.stack_bytes <= report.spill_bytes, f"{launch} keeps {report.stack_bytes} bytes of stack"
    assert not report.notes, f"{launch}: {report.notes}"
    return report


def compile_all(call: Callable[[], object], num: int, max_spill_bytes: int = 0) -> list[CompileReport]:
    """What it says of each of a call's `num` launches."""
    return [compiled(launch, max_spill_bytes) for launch in launched(call, num)]


def assert_moves_16_bytes(launch: Launch | str, ptx: str, stored: str = r"v4\.b32") -> None:
    """Loads, and stores of the given kind, are of 16 bytes at once."""
    assert re.search(r"ld\.global[\w.:]*v4\.b32", ptx), f"{launch} loads less than 16 bytes at once"
    assert re.search(rf"st\.global[\w.:]*{stored}", ptx), f"{launch} stores less at once"
