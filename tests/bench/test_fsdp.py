"""The bench of FSDP2 as rank 0 of simulated ranks at toy sizes: its rows, and what a trace adds to them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.profiling.kernels import Kernel
from bench.record import Record
from bench.speed import fsdp, overlap
from octavo.optim import AdamW


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = []

    def build(*args: Any) -> torch.optim.Optimizer:
        made.append(original(*args))
        return made[-1]

    original = fsdp.build_optimizer
    monkeypatch.setattr(fsdp, "build_optimizer", build)
    return made


@pytest.mark.largest
def test_fp8_adamw_is_a_variant_of_its_own(
    tmp_path: Path, optimizers: list[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "WARMUP_STEPS", 1)
    monkeypatch.setattr(fsdp, "TIMED_STEPS", 1)
    asked = ["--device", "cpu", "--simulate", "2", "--filter", "AdamW", "--out", str(tmp_path), "--commit", "abc"]
    assert fsdp.main([*asked, "--tokens", "16", "64"]) == 0
    for name in ("fsdp_simulated_16_tokens", "fsdp_simulated"):  # 64 tokens are what a toy has
        rows = {(r["case"], r["metric"]): r for r in json.loads((tmp_path / f"{name}.json").read_text())["rows"]}
        assert {case for case, _ in rows} == {fsdp.BASE, fsdp.FP8_ADAMW}
        row = rows[fsdp.FP8_ADAMW, "time"]
        assert row["peer"] == fsdp.BASE and row["peer_value"] == rows[fsdp.BASE, "time"]["value"] > 0
    assert [type(one) for one in optimizers] == [torch.optim.AdamW, AdamW] * 2
    assert optimizers[1].defaults["state_dtype"] == "fp8" and optimizers[1].defaults["master_weights"] is None


def test_a_cpu_is_not_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fsdp.main(["--device", "cpu", "--simulate", "2", "--trace", str(tmp_path)])
    assert "a CPU has no kernels to trace" in capsys.readouterr().err


def test_a_trace_gives_rows_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {
        index: [
            Kernel("gemm", 7, 0, 10_000),
            Kernel("ncclDevKernel_AllGather", 8, 8_000, 12_000 + 1_000 * index),
        ]
        for index in range(3)
    }
    monkeypatch.setattr(overlap, "trace_steps", lambda *_: [Path(str(index)) for index in kernels])
    monkeypatch.setattr(overlap, "trace_host", lambda *_: "a table")
    monkeypatch.setattr(fsdp, "read_kernels", lambda path: kernels[int(path.name)])
    monkeypatch.setattr(fsdp.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(fsdp, "_wait", lambda _: None)
    record = Record("fsdp", "", device="cpu")
    fsdp.trace(record, fsdp.FP8_ADAMW, lambda: torch.zeros(()), tmp_path / "2048", "cpu")
    rows = {row["metric"]: row for row in record.rows}
    assert rows["all-gather exposed"]["value"] == 3.0 and rows["all-gather kernels"]["value"] == 5.0
    assert rows["all-gather beside compute"]["value"] == pytest.approx(0.4)
    assert rows["compute stream idle in a step"]["value"] == 3.0 and rows["no stream busy in a step"]["value"] == 0.0
    assert [path.name for path in (tmp_path / "2048").iterdir()] == ["delayed_FP8-all-gather_FP8-AdamW.svg"]
