"""The profile of an engine's steps names what ran, by kind of step."""

import pytest

from bench.speed.engine_profile import main


@pytest.mark.slow
def test_both_kinds_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-seqs", "3", "--prompt-len", "20", "--output-len", "8", "--steps", "2"]
    assert main(["--quick", "--device", "cpu", "--layers", "1", "--variant", "bf16", *sizes]) == 0
    text = capsys.readouterr().out
    assert "steps of single tokens: " in text and " ms a step" in text
    assert "aten::" in text
