"""Variants in processes of their own: results, events, and every way to fail."""

import os
from typing import Any

import pytest

from bench.demo.workers import Tell, Workers
from octavo.errors import NonFiniteError
from tests.assertions import assert_raises


def square(job: int, tell: Tell) -> int:
    tell(job + 1)
    return job * job


def fail(job: str, tell: Tell) -> None:
    if job == "octavo":
        raise NonFiniteError("the loss is nan")
    if job == "bug":
        raise KeyError("no such thing")
    if job == "die":
        os._exit(3)


@pytest.mark.parametrize(
    "size", [pytest.param(0, id="here"), pytest.param(2, id="processes", marks=pytest.mark.largest)]
)
def test_results_and_events(size: int) -> None:
    events: list[tuple[str, Any]] = []
    with Workers(size) as workers:
        results = workers.run(square, {"a": 2, "b": 3}, lambda name, event: events.append((name, event)))
        again = workers.run(square, {"c": 5})
    assert results == {"a": 4, "b": 9}
    assert again == {"c": 25}
    assert sorted(events) == [("a", 3), ("b", 4)]


def test_a_failing_variant_is_named() -> None:
    with Workers(1) as workers:
        for job, error, text in (
            ("octavo", NonFiniteError, "variant 'x': the loss is nan"),
            ("bug", RuntimeError, "variant 'x' failed:\nTraceback.*no such thing"),
            ("die", RuntimeError, "variant 'x': its process died with exit code 3"),
        ):
            assert_raises(error, f"(?s){text}", workers.run, fail, {"x": job})
