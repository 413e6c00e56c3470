"""The learning rate over a run."""

import itertools

import pytest

from octavo.train.config import ScheduleSection
from octavo.train.schedule import learning_rate


def curve(num_steps: int = 100, peak: float = 2.0, **fields: object) -> list[float]:
    schedule = ScheduleSection(**({"warmup_steps": 10, "min_ratio": 0.1} | fields))
    return [learning_rate(step, num_steps, peak, schedule) for step in range(num_steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(kind: str) -> None:
    assert curve(kind=kind)[:11] == pytest.approx([0.2 * (i + 1) for i in range(10)] + [2.0])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_falls_to_the_floor_at_the_last_step(kind: str) -> None:
    rates = curve(kind=kind)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2)
    assert curve(kind=kind, min_ratio=0.0)[-1] == pytest.approx(0.0)


def test_known_points() -> None:
    cosine = curve(num_steps=111, peak=1.0, kind="cosine", min_ratio=0.0)
    linear = curve(num_steps=111, peak=1.0, kind="linear", min_ratio=0.0)
    assert cosine[60] == linear[60] == pytest.approx(0.5)
    assert cosine[35] == pytest.approx(0.8535534)
    assert linear[35] == pytest.approx(0.75)


def test_constant_stays_and_no_warm_up_starts_at_the_peak() -> None:
    assert set(curve(kind="constant", warmup_steps=0)) == {2.0}
    assert curve(warmup_steps=0)[0] == 2.0


def test_shortest_runs() -> None:
    assert curve(num_steps=1, warmup_steps=0) == [2.0]
    assert curve(num_steps=2, warmup_steps=1) == [2.0, 2.0]
