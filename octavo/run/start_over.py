"""A run that is told to start over does so once a job: what torchrun starts again after a fault goes on."""

from collections.abc import Iterable
from pathlib import Path

from octavo.env import torchrun_place
from octavo.run.atomic import move_aside, write_atomic

_FILE = ".started-over"


def start_over(directory: Path, names: Iterable[str]) -> Path | None:
    """move_aside, which a later try of the same job finds done."""
    aside, place = move_aside(directory, names), torchrun_place()
    if place is not None:
        write_atomic(directory / _FILE, place.job)
    return aside


def has_started_over(directory: Path) -> bool:
    """Whether this is another try of a torchrun job that has started over in a directory."""
    place, file = torchrun_place(), directory / _FILE
    if place is None or place.attempt == 0 or not file.is_file():
        return False
    return file.read_text(encoding="utf-8", errors="replace") == place.job
