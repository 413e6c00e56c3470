"""Every benchmark runs on a CPU at toy sizes, peers absent, and its record holds what its table shows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import BenchOptions, run_benchmark
from bench.speed import linear
from bench.speed.gemm import PRODUCTS
from bench.timing import time_back_to_back


def rows_of(name: str, folder: Path, **fields: object) -> list[dict[str, object]]:
    """Rows of the record of a quick run."""
    options = BenchOptions(device="cpu", quick=True, out=folder, commit="abc", **fields)  # type: ignore[arg-type]
    assert run_benchmark(name, options)
    document = json.loads((folder / f"{name}.json").read_text())
    assert document["commit"] == "abc"
    return document["rows"]


def ours(*recipes: str, end: str = "") -> set[str]:
    return {f"octavo {recipe}{end}" for recipe in recipes}


SLOW = pytest.mark.slow
BF16 = "bf16, compiled"
STEPS = {BF16, "bf16"} | ours("bf16", "delayed")
STEPS |= {f"{case}, FP8 AdamW" for case in STEPS} | {f"whole model, {case}" for case in STEPS}
PAIRS = ("bf16", "Q/DQ", "Q/DQ fused", "Q/DQ fused, fast sums")


@pytest.mark.parametrize(
    ("name", "fields", "cases", "metrics"),
    [
        ("layer", {"recipes": ("delayed",)}, {BF16} | ours("bf16", "delayed"), {"time", "speedup"}),
        ("qdq", {}, {f"{block}, toy 2x16 {p}" for block in ("Llama", "GPT-J") for p in PAIRS}, {"pairs' kernels left"}),
        ("capacity", {"recipes": ("rowwise",)}, {"plain torch bf16"} | ours("rowwise"), {"most tokens a step"}),
        pytest.param("quant", {}, set(), {"bandwidth", "share of copy bandwidth"}, marks=SLOW),
        pytest.param(
            *("step", {"recipes": ("delayed",), "passes": 1}, STEPS),
            {"step time", "throughput", "peak memory", "speedup", "share of the roofline", "loss after 12 steps"},
            marks=pytest.mark.largest,
        ),
        pytest.param("sizes", {"recipes": ("blockwise",)}, set(), {"step time", "speedup"}, marks=pytest.mark.largest),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_quick_run(name: str, fields: dict[str, Any], cases: set[str], metrics: set[str], tmp_path: Path) -> None:
    rows = rows_of(name, tmp_path, **fields)
    assert cases <= {row["case"] for row in rows} and metrics <= {row["metric"] for row in rows}


def test_gemm(tmp_path: Path) -> None:
    errors = [row for row in rows_of("gemm", tmp_path) if row["metric"] == "relative error"]
    assert len(errors) == len(PRODUCTS)
    assert all(0 < row["value"] < row["peer_value"] for row in errors)  # type: ignore[operator]


def test_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_threads: list[bool] = []

    def watch(*args: Any, **kwargs: Any) -> Any:
        on_threads.append(torch._C._is_multithreading_enabled())
        return time_back_to_back(*args, **kwargs)

    monkeypatch.setattr(linear, "time_back_to_back", watch)
    table = tmp_path / "table.json"
    rows = rows_of("linear", tmp_path, write_table=table, recipes=("rowwise",))
    assert on_threads == [True, False, True]  # torch's defaults, the backward on the calling thread, a step of several
    ways = {str(row["metric"]) for row in rows if str(row["metric"]).startswith("time, ")}
    assert ways == {"time, step", "time, eager", "time, eager, one thread", "time, queued"}
    assert torch._C._is_multithreading_enabled()
    assert {f"64x128x256 octavo rowwise{end}" for end in ("", ", cached weight")} < {str(row["case"]) for row in rows}
    [[*shape, step, eager, graph]] = json.loads(table.read_text())["recipes"]["rowwise"]
    assert shape == [64, 128, 256] and step > 0 and eager > 0 and graph is None  # there is none on a CPU
