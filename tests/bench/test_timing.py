"""How many calls a burst has: the same for every variant, as many as the quickest makes in 40 ms."""

from collections import Counter

import pytest

from bench import timing


@pytest.mark.parametrize(("ms", "expected"), [(0.1, 60), (1.0, 40), (3.0, 14), (50.0, 10)], ids=str)
def test_calls_of_a_burst(monkeypatch: pytest.MonkeyPatch, ms: float, expected: int) -> None:
    clock = {"s": 0.0}
    counts: Counter[str] = Counter()

    def call(name: str, seconds: float) -> None:
        clock["s"] += seconds
        counts[name] += 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["s"])
    variants = {"quick": lambda: call("quick", ms / 1e3), "slow": lambda: call("slow", 2 * ms / 1e3)}
    found = timing.time_back_to_back(variants, bursts=3, device="cpu")
    assert counts["quick"] == counts["slow"] == 10 + 3 * (5 + expected)
    assert found["quick"].median_us == pytest.approx(ms * 1e3) and found["slow"].median_us == pytest.approx(2e3 * ms)


def test_a_burst_of_ones_own() -> None:
    calls: list[int] = []
    timing.time_back_to_back({"one": lambda: calls.append(1)}, bursts=2, device="cpu", burst=7)
    assert len(calls) == 2 * (5 + 7)
