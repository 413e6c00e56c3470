"""What is read ahead: in order, so much at a time, and nothing behind what fails."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.models.checkpoint import read_ahead as module
from octavo.models.checkpoint.read_ahead import read_ahead


class Reads:
    """Reads of a byte each that note when they begin; those of `held` wait until they are let go."""

    def __init__(self, *held: int) -> None:
        self.begun: list[int] = []
        self.changed = threading.Condition()
        self.held = set(held)

    def __call__(self, number: int) -> Callable[[], int]:
        def read() -> int:
            with self.changed:
                self.begun.append(number)
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: number not in self.held, 30)
            return number

        return read

    def let_go(self) -> None:
        with self.changed:
            self.held.clear()
            self.changed.notify_all()

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.begun) >= count, 30)


def test_they_come_in_order_while_later_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SHARE_AHEAD", 1.0)
    reads = Reads(0)
    found = read_ahead([(1, reads(i)) for i in range(10)], "cpu")
    got: list[int] = []
    caller = threading.Thread(target=lambda: got.extend(found))
    caller.start()
    assert reads.wait_for(10) and got == []  # all but the first are done
    reads.let_go()
    caller.join()
    assert got == list(range(10))


@pytest.mark.parametrize(("share", "most", "ahead"), [(0.3, 1 << 30, 3), (1.0, 4, 4), (0.01, 1 << 30, 1)])
def test_no_more_is_held_than_may_be(share: float, most: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SHARE_AHEAD", share)
    monkeypatch.setattr(module, "MAX_BYTES_AHEAD", most)
    reads = Reads()
    for number in read_ahead([(1, reads(i)) for i in range(10)], "cpu"):
        expected = min(number + ahead, 10)
        assert reads.wait_for(expected) and len(reads.begun) == expected


def test_what_fails_is_raised_in_its_turn_and_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SHARE_AHEAD", 0.2)
    reads = Reads()

    def fail() -> int:
        raise OSError("damaged")

    got: list[int] = []
    with pytest.raises(OSError, match="damaged"):
        got.extend(read_ahead([(1, fail if i == 3 else reads(i)) for i in range(10)], "cpu"))
    assert sorted(reads.begun) in ([0, 1, 2], [0, 1, 2, 4])
    for number in (found := read_ahead([(1, Reads()(i)) for i in range(4)], "cpu")):
        assert number == 0
        break
    found.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-read-ahead")]


@pytest.mark.gpu
def test_they_are_read_under_the_callers_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        mine = torch.cuda.current_stream()
        streams: list[Any] = list(read_ahead([(1, torch.cuda.current_stream)] * 3, "cuda"))
    assert streams == [mine] * 3
