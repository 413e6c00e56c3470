"""The budget splits what is left, and never promises more."""

import pytest

from bench.demo.budget import Budget


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
