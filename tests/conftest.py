"""Shared fixtures, the order of collection, and no waiting for the disk."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

TESTS = Path(__file__).parent
# No test takes the power away, so none waits until the disk has its files. Tests of what is synced, and when, record
# the call.
os.fsync = os.fstat  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Let every other worker collect from the end, where all is asked for.

    pytest rewrites each file's asserts once a change, which takes longer than all the rest of a collection: so each
    worker rewrites half of them and reads the other half.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if config.args == ["tests"] and int(worker.removeprefix("gw")) % 2:
        config.args = sorted(map(str, [*TESTS.glob("*/"), *TESTS.glob("test_*.py")]), reverse=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One order in all workers, but those marked slow(first=True) come first.

    At the end one of them would keep one worker busy alone.
    """
    items.sort(key=lambda item: item.path)
    items.sort(key=lambda item: not any(mark.kwargs.get("first") for mark in item.iter_markers("slow")))


def pytest_collection_finish() -> None:
    """Take what collection made out of the garbage collector's sight: else each of its rounds walks all of it."""
    gc.collect()
    gc.freeze()


# A GPU's items are not collected where there is none: they would be a third of all.
_DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU always; the GPU in the lane `make test-gpu`."""
    return torch.device(request.param)


@pytest.fixture(autouse=torch.cuda.is_available())
def engines_begin_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up of an engine takes longer than most tests that make one; those of it call warm_up."""
    monkeypatch.setattr("octavo.serve.engine.engine.Engine.prepare", lambda engine: None)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """SIGINT and SIGTERM as Python has them, where the tests are a background job that ignores some of them."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    inherited = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in inherited.items():
        signal.signal(number, handler)


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh seeded randomness on the CPU: inputs are the same on every device."""
    return torch.Generator().manual_seed(0)


class Ended(NamedTuple):
    code: int | str
    out: str
    err: str


RunOctavo = Callable[..., Ended]


@pytest.fixture
def run_octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunOctavo:
    """run_octavo(argument, ...) is `octavo argument ...` in this process."""

    def run(*arguments: object) -> Ended:
        from octavo.cli import main

        monkeypatch.setattr("sys.argv", ["octavo", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())

    return run
