"""Runs every file of kernel tests in a process with the corrected interpreter, which cannot be switched on later."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.errors import BackendError
from octavo.testing import interpreter

TESTS = Path(__file__).parent.parent
FILES = [TESTS / "testing" / "test_casts.py", *sorted(TESTS.glob("ops/*/test_triton.py"))]


@pytest.mark.skipif(interpreter.is_interpreting(), reason="this starts the interpreter")
@pytest.mark.parametrize(
    "path",
    [FILES[0], *(pytest.param(p, marks=pytest.mark.slow) for p in FILES[1:])],
    ids=lambda p: str(p.relative_to(TESTS)),
)
def test_kernels_in_the_interpreter(path: Path) -> None:
    done = interpreter.run_pytest(str(path))
    assert done.returncode == 0, done.stdout


def test_it_needs_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match="needs TRITON_INTERPRET=1 before the first kernel"):
        interpreter.correct_interpreter()


def test_an_unknown_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    with pytest.raises(BackendError, match=r"private names of triton 3\.6\.0, 3\.7\.1, got 9\.9\.9"):
        interpreter.correct_interpreter()
