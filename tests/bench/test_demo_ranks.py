"""`octavo demo --ranks`: all equal to one process, and what is not equal is found."""

import json
import shutil
from pathlib import Path

import pytest

from bench.demo.ranks import _compare_rl, _compare_samples, _compare_training, run_ranks_demo
from octavo.errors import ConfigError
from tests.quiet import cores_alone

Sampled = tuple[list[int], list[float]]


@pytest.mark.slow(first=True)
def test_two_ranks_are_equal_to_one_process_and_a_difference_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a third of the demo's steps: a checkpoint, some steps, the kill, and some more."""
    from bench.demo.display import Display

    monkeypatch.setattr("bench.demo.ranks._STEPS", 8)
    monkeypatch.setattr("bench.demo.ranks._KILL_AFTER", 5)
    with cores_alone():
        assert run_ranks_demo(2, tmp_path, 0, Display())
    compared = json.loads((tmp_path / "ranks.json").read_text())["compared"]
    assert len(compared) == 6 and all(row["is_equal"] for row in compared)
    metrics = tmp_path / "ranks" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1', 1))
    (weights,) = (tmp_path / "rl-ranks" / "final").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    assert [each.is_equal for each in (*_compare_training(tmp_path, 2, 5), *_compare_rl(tmp_path))] == [
        False,
        True,
        True,
        True,
        False,
    ]
    shutil.rmtree(tmp_path / "ranks" / "checkpoints")
    assert not list(_compare_training(tmp_path, 2, 5))[1].is_equal


@pytest.mark.parametrize(
    "cut", [[([3, 4], [-1.0, -2.0])], [([3, 5], [-1.0, -2.5])], [([3, 4], [-1.0, -2.0]), ([3], [-1.0])], []]
)
def test_samples_that_differ_are_seen(cut: list[Sampled], monkeypatch: pytest.MonkeyPatch) -> None:
    one: list[Sampled] = [([3, 4], [-1.0, -2.5])]
    monkeypatch.setattr("bench.demo.ranks._sample", lambda model, num_ranks, seed: one if num_ranks == 1 else cut)
    assert not _compare_samples(Path("model"), 2, 0).is_equal
    cut[:] = one
    assert _compare_samples(Path("model"), 2, 0).is_equal
    one.clear()
    cut.clear()
    assert not _compare_samples(Path("model"), 2, 0).is_equal  # nothing was sampled


def test_one_rank_is_refused(run_octavo, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = run_octavo("demo", "--ranks", "1", "--out", str(tmp_path))
    assert ended.code == 2 and "--ranks must be at least 2, got 1" in ended.err
    assert ConfigError.__name__ not in ended.err
