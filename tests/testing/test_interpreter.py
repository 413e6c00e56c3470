"""Runs every file of kernel tests in a process with the corrected interpreter, which cannot be switched on later."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.errors import BackendError
from octavo.testing import interpreter
from tests.assertions import assert_raises

TESTS = Path(__file__).parent.parent
# wherever they are: a file that moves must not be left out
FILES = [TESTS / "ops" / "quantize" / "test_delayed.py", *sorted((TESTS / "ops").rglob("test_triton*.py"))]
NUM_PROCESSES = 2  # each takes seconds to start


def names(paths: list[Path]) -> str:
    return "+".join(p.parent.name if p.name == "test_triton.py" else p.stem for p in paths)


def run(paths: list[Path], *options: str) -> None:
    done = interpreter.run_pytest(*options, *map(str, paths))
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(interpreter.is_interpreting(), reason="this starts the interpreter")
def test_casts_and_ragged_blocks() -> None:
    ragged = "test_triton.py::test_a_ragged_last_block_has_no_part_of_its_neighbours"
    experts = "test_ragged_experts.py::test_the_kernel_has_the_bits_of_the_reference"
    run([TESTS / "testing" / "test_casts.py", TESTS / "ops" / "quantize" / ragged, TESTS / "nn" / experts])


GROUPS = pytest.mark.parametrize("paths", [FILES[i::NUM_PROCESSES] for i in range(NUM_PROCESSES)], ids=names)


@pytest.mark.slow(first=True)
@pytest.mark.skipif(interpreter.is_interpreting(), reason="this starts the interpreter")
@GROUPS
def test_kernels_in_the_interpreter(paths: list[Path]) -> None:
    """Of every test about a sixth of its cases; the next test has all."""
    run(paths, "-p", "tests.one_in_six")


@pytest.mark.largest
@pytest.mark.skipif(interpreter.is_interpreting(), reason="this starts the interpreter")
@GROUPS
def test_all_cases_in_the_interpreter(paths: list[Path]) -> None:
    run(paths)


def test_it_needs_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert_raises(BackendError, "needs TRITON_INTERPRET=1 before the first kernel", interpreter.correct_interpreter)


def test_an_unknown_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    with pytest.raises(BackendError, match=r"private names of triton 3\.6\.0, 3\.7\.1, 3\.8\.0, got 9\.9\.9"):
        interpreter.correct_interpreter()
