"""Every benchmark runs on a CPU at toy sizes, peers absent, and its record holds what its table shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import BENCHMARKS, BenchOptions, run_benchmark
from bench.options import FP8_RECIPES
from bench.record import Record
from bench.speed import linear
from bench.speed.gemm import PRODUCTS

STEP_METRICS = {"step time", "throughput", "peak memory", "speedup", "share of the roofline"}


def rows_of(name: str, folder: Path, **fields: object) -> list[dict[str, object]]:
    """Rows of the record of a quick run."""
    options = BenchOptions(device="cpu", quick=True, out=folder, commit="abc", **fields)  # type: ignore[arg-type]
    assert run_benchmark(name, options)
    document = json.loads((folder / f"{name}.json").read_text())
    assert document["commit"] == "abc"
    record = Record("x", "y", device="cpu")
    record.add("a", "b", "c", 1.0)
    assert all(row.keys() == record.rows[0].keys() for row in document["rows"])
    return document["rows"]


def test_gemm(tmp_path: Path) -> None:
    rows = rows_of("gemm", tmp_path)
    assert {row["metric"] for row in rows} == {"rate", "share of the roofline", "relative error"}
    errors = [row for row in rows if row["metric"] == "relative error"]
    assert len(errors) == len(PRODUCTS)
    assert all(0 < row["value"] < row["peer_value"] for row in errors)  # type: ignore[operator]


def test_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_threads: list[tuple[str, bool]] = []

    def watch(name: str, timer: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            on_threads.append((name, torch._C._is_multithreading_enabled()))
            return timer(*args, **kwargs)

        return timed

    for name in ("time_calls", "time_back_to_back"):
        monkeypatch.setattr(linear, name, watch(name, getattr(linear, name)))
    table = tmp_path / "table.json"
    rows = rows_of("linear", tmp_path, write_table=table)
    eager = [is_threaded for name, is_threaded in on_threads if name == "time_back_to_back"]
    assert eager == [True, False, True]  # torch's defaults, the backward on the calling thread, a step of several
    ways = {str(row["metric"]) for row in rows if str(row["metric"]).startswith("time, ")}
    assert ways == {"time, step", "time, eager", "time, eager, one thread", "time, queued"}
    assert torch._C._is_multithreading_enabled()
    cases = {str(row["case"]) for row in rows}
    assert {f"64x128x256 octavo {recipe}{end}" for recipe in FP8_RECIPES for end in ("", ", cached weight")} < cases
    recipes = json.loads(table.read_text())["recipes"]
    assert set(recipes) == set(FP8_RECIPES)
    for lines in recipes.values():
        assert [line[:3] for line in lines] == [[64, 128, 256]]
        assert lines[0][3] > 0
        assert lines[0][4] > 0
        assert lines[0][5] is None  # no graph on a CPU


@pytest.mark.slow
def test_quant(tmp_path: Path) -> None:
    rows = rows_of("quant", tmp_path)
    assert {row["unit"] for row in rows} == {"GB/s", "share"}
    assert len({row["case"] for row in rows}) > 20


def test_layer(tmp_path: Path) -> None:
    rows = rows_of("layer", tmp_path)
    assert {row["case"] for row in rows} == {"bf16, compiled", "octavo bf16", *(f"octavo {r}" for r in FP8_RECIPES)}


@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    rows = rows_of("step", tmp_path, recipes=("delayed",), passes=1)
    ours = [f"octavo {recipe}{end}" for recipe in ("bf16", "delayed") for end in ("", ", FP8 AdamW")]
    assert {row["case"] for row in rows} == {"bf16, compiled", *ours}
    assert {str(row["metric"]) for row in rows} == STEP_METRICS | {"loss after 12 steps"}


@pytest.mark.slow
def test_sizes(tmp_path: Path) -> None:
    rows = rows_of("sizes", tmp_path, recipes=("blockwise",))
    assert {str(row["case"]).split()[0] for row in rows} == {"a"}
    assert {row["metric"] for row in rows} == {"step time", "speedup"}


def test_qdq(tmp_path: Path) -> None:
    rows = rows_of("qdq", tmp_path)
    cases = {str(row["case"]) for row in rows}
    variants = ("bf16", "Q/DQ", "Q/DQ fused", "Q/DQ fused, fast sums")
    assert cases == {f"{block}, toy 2x16 {variant}" for block in ("Llama", "GPT-J") for variant in variants}
    left = [row for row in rows if row["metric"] == "pairs' kernels left"]
    assert [(row["value"], row["peer_value"]) for row in left] == [(1, 7), (1, 6)]
    assert {row["peer"] for row in rows if str(row["metric"]).startswith("speedup over")} == {"Q/DQ", "bf16"}


def test_capacity(tmp_path: Path) -> None:
    rows = rows_of("capacity", tmp_path, recipes=("blockwise",))
    most = {row["case"]: row["value"] for row in rows if row["metric"] == "most tokens a step"}
    assert most["plain torch bf16"] == most["octavo blockwise"] == 128.0  # a CPU's memory never ends


def test_every_benchmark_is_run_here() -> None:
    assert set(BENCHMARKS) == {"gemm", "quant", "linear", "layer", "step", "sizes", "capacity", "qdq", "serve", "rl"}
