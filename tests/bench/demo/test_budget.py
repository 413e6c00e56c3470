"""The budget splits what is left, and never promises more."""

import pytest

from bench.demo.budget import MIN_SECONDS, Budget, check_seconds, num_steps_within
from bench.demo.sizes import CPU, GPU
from octavo.errors import ConfigError


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_stages_share_what_is_left() -> None:
    clock = Clock()
    budget = Budget(100.0, {"train": 3, "rl": 1, "report": 1}, clock=clock)
    with budget.stage("train") as seconds:
        assert seconds == pytest.approx(60.0)
        clock.now += 50.0
    assert budget.spent == {"train": 50.0}
    assert budget.seconds_for("rl") == pytest.approx(25.0)  # the 10 s that were saved are split


def test_an_overrun_is_taken_from_the_later_stages() -> None:
    clock = Clock()
    budget = Budget(100.0, {"train": 3, "rl": 1, "report": 1}, clock=clock)
    with budget.stage("train"):
        clock.now += 90.0
    assert budget.seconds_for("rl") == pytest.approx(5.0)
    clock.now += 1000.0
    assert budget.seconds_for("rl") == pytest.approx(2.0)  # a tenth of 20 s, however late it is


def test_time_before_the_budget_counts() -> None:
    clock = Clock()
    budget = Budget(100.0, {"train": 1}, clock=clock, began=clock.now - 20.0)
    assert budget.elapsed == pytest.approx(20.0)
    assert budget.seconds_for("train") == pytest.approx(80.0)


def test_a_short_demo_reads_less_text() -> None:
    assert CPU.within(280.0) == CPU
    short = CPU.within(20.0)
    assert (short.data.max_bytes, short.data.tokenizer_bytes) == (1_000_000, 250_000)
    assert short.model == CPU.model
    assert GPU.within(20.0).data.max_bytes == 0  # all of it


@pytest.mark.parametrize("seconds", [0.0, -5.0, MIN_SECONDS - 1, float("nan")])
def test_too_little_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--seconds must be at least"):
        check_seconds(seconds)


def test_steps_fit_and_stay_in_bounds() -> None:
    assert num_steps_within(10.0, 0.3, least=5, most=1000) == 33
    assert num_steps_within(0.1, 0.3, least=5, most=1000) == 5
    assert num_steps_within(1e6, 0.3, least=5, most=1000) == 1000
