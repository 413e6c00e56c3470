"""Small problems with their answers, made on the spot: the data of a fine-tuning run that needs no file."""

import json
from collections.abc import Iterator

import numpy as np

from octavo.train.data import splitmix64

TASKS = "tasks"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def make_tasks(num_tasks: int) -> Iterator[str]:
    """Conversations as JSON lines: one question each in three of four, in the fourth a second that asks it again.

    The n-th task is the same everywhere and always.
    """
    for index in range(num_tasks):
        draws = _draws(index)
        question, answer = _KINDS[next(draws) % len(_KINDS)](draws)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if next(draws) % 4 == 0:
            messages += [{"role": "user", "content": "again"}, {"role": "assistant", "content": answer}]
        yield json.dumps({"messages": messages})


def _draws(index: int) -> Iterator[int]:
    """Numbers below 2**63 that depend on the index alone, whatever the version of a library."""
    state = np.array([index], dtype=np.uint64)
    while True:
        state = splitmix64(state)
        yield int(state[0] >> np.uint64(1))


def _plus(draws: Iterator[int]) -> tuple[str, str]:
    a, b = next(draws) % 10, next(draws) % 10
    return f"{a} plus {b}", str(a + b)


def _larger(draws: Iterator[int]) -> tuple[str, str]:
    a, b = next(draws) % 10, next(draws) % 10
    return f"larger of {a} and {b}", str(max(a, b))


def _after(draws: Iterator[int]) -> tuple[str, str]:
    i = next(draws) % (len(_LETTERS) - 1)
    return f"letter after {_LETTERS[i]}", _LETTERS[i + 1]


def _spell(draws: Iterator[int]) -> tuple[str, str]:
    i = next(draws) % len(_NUMBERS)
    return f"spell {i}", _NUMBERS[i]


_KINDS = (_plus, _larger, _after, _spell)
