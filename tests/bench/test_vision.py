"""The vision transformer at toy size."""

import json
from pathlib import Path

import pytest
import torch

from bench.training import vision


@pytest.mark.largest
def test_the_command_writes_a_line_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = "bf16,delayed,blockwise"
    command = ["--quick", "--device=cpu", "--seeds=1", "--jobs=1", f"--variants={variants}", f"--out={tmp_path}"]
    assert vision.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "vision.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows if row["task"] == "shapes"] == variants.split(",")
    assert rows[0]["fp8_flop_share"] == 0.0 and rows[1]["fp8_flop_share"] > 0.9
    assert "shapes blockwise" in capsys.readouterr().out


def test_shapes_are_drawn_from_their_seed() -> None:
    images, labels = vision.draw_shapes(40, seed=3)
    assert torch.equal(images, vision.draw_shapes(40, seed=3)[0]) and images.isfinite().all()
    assert labels.bincount().tolist() == [4] * 10


def test_each_shape_has_an_inside_and_an_outside() -> None:
    radius, angle = torch.linspace(0, 3, 300)[:, None], torch.linspace(-3.1, 3.1, 200)[None, :]
    for shape in vision.SHAPES:
        inside = shape(radius.expand(300, 200), angle.expand(300, 200))
        assert 0.02 < inside.float().mean() < 0.5
