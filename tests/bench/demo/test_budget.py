"""The budget splits what is left, and never promises more."""

import pytest

from bench.demo.budget import Budget, num_steps_within
from bench.demo.sizes import CPU, GPU


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("taken", "left"), [(50.0, 25.0), (90.0, 5.0)], ids=["saved", "overrun"])
def test_later_stages_share_what_is_left(taken: float, left: float) -> None:
    clock = Clock()
    budget = Budget(100.0, {"train": 3, "rl": 1, "report": 1}, clock=clock)
    with budget.stage("train") as seconds:
        assert seconds == pytest.approx(60.0)
        clock.now += taken
    assert budget.spent == {"train": taken}
    assert budget.seconds_for("rl") == pytest.approx(left)
    clock.now += 1000.0
    assert budget.seconds_for("rl") == pytest.approx(2.0)  # a tenth of 20 s, however late it is
    later = Budget(100.0, {"train": 1}, clock=clock, began=clock.now - 20.0)
    assert (later.elapsed, later.seconds_for("train")) == pytest.approx((20.0, 80.0))


def test_a_short_demo_reads_less_text() -> None:
    assert CPU.within(280.0) == CPU
    short = CPU.within(20.0)
    assert (short.data.max_bytes, short.data.tokenizer_bytes, short.model) == (1_000_000, 250_000, CPU.model)
    assert GPU.within(20.0).data.max_bytes == 0  # all of it


def test_steps_fit_and_stay_in_bounds() -> None:
    assert [num_steps_within(s, 0.3, least=5, most=1000) for s in (10.0, 0.1, 1e6)] == [33, 5, 1000]
