"""The profile of an engine's steps names what ran, by kind of step."""

import pytest

from bench.speed.engine_profile import Profile, main


@pytest.mark.slow
def test_both_kinds_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-seqs", "3", "--prompt-len", "20", "--output-len", "8", "--steps", "2"]
    assert main(["--quick", "--device", "cpu", "--layers", "1", "--variant", "bf16", *sizes]) == 0
    text = capsys.readouterr().out
    assert "steps of single tokens: " in text and " ms a step" in text
    assert "aten::" in text


def test_the_table_is_of_one_step() -> None:
    profile = Profile("steps", num_steps=4, seconds=0.008, kernels={"a": [8, 400.0], "b": [4, 4000.0]})
    head, *rows = profile.format(5).splitlines()
    assert head == "steps: 2.000 ms a step, device busy 1.100 ms"
    found = [[*row.split()[:5], row[-1]] for row in rows]
    assert found == [["1.000", "ms", "1.0", "x", "1000.0", "b"], ["0.100", "ms", "2.0", "x", "50.0", "a"]]
    assert profile.format(1).splitlines() == [head, rows[0]]
    assert Profile("none").format(3) == "none: no such step"
