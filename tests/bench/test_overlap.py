"""What a trace of kernels says of overlap, from traces made by hand; and how steps are profiled."""

import json
import re
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity

from bench.profiling.kernels import Kernel, read_kernels
from bench.speed.overlap import Timeline, trace_steps

GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)"
KERNELS = [
    Kernel("gemm", 7, 100, 1_100),
    Kernel("gemm", 7, 1_000, 2_100),  # the end of one beside the start of the next
    Kernel("gemm", 7, 3_100, 5_100),
    Kernel("copy", 20, 0, 50),  # FSDP2's copy into its buffer, on a stream of its own
    Kernel(GATHER, 21, 50, 600),  # 50 before compute
    Kernel(GATHER, 21, 2_000, 2_600),  # 500 between two
    Kernel(SCATTER, 22, 5_000, 6_100),  # 1000 after all
]


def test_collectives_beside_compute() -> None:
    timeline = Timeline(KERNELS)
    found = timeline.overlaps()
    assert timeline.stream == 7 and list(found) == ["all-gather", "reduce-scatter"]
    assert found["all-gather"].ms == pytest.approx(1.15) and found["all-gather"].exposed_ms == pytest.approx(0.55)
    assert found["reduce-scatter"].share == pytest.approx(0.1 / 1.1)
    assert timeline.span_ms == pytest.approx(6.1) and timeline.idle_ms == pytest.approx(2.1)
    assert timeline.empty_ms == pytest.approx(0.5)  # from 2600 to 3100
    said = timeline.describe()
    assert said.splitlines()[0].split() == ["4.100", "ms", "3", "x", "gemm"]
    assert "all-gather: 1.15 ms, 52% beside compute, 0.55 ms exposed" in said


def test_copy_engines_are_collectives() -> None:
    timeline = Timeline([Kernel("gemm", 7, 0, 100), Kernel("Memcpy PtoP (Device -> Device)", 9, 50, 150)])
    assert timeline.overlaps()["peer copies"].exposed_ms == pytest.approx(0.05)


def test_the_picture_is_small_and_shows_every_span(tmp_path: Path) -> None:
    many = [Kernel("gemm", 7, start, start + 9) for start in range(0, 200_000, 10)]
    Timeline([*many, Kernel(GATHER, 21, 0, 100_000)]).draw(tmp_path / "one.svg", "a step")
    text = (tmp_path / "one.svg").read_text()
    assert len(text) < 100_000 and text.count("<path") == 3
    compute, gather = (re.search(rf'd="([^"]*)" fill="{color}"', text) for color in ("#30507a", "#c2410c"))
    assert compute is not None and compute.group(1).count("M") == 1  # gaps below half a pixel are closed
    assert gather is not None and gather.group(1).startswith("M120.0 68h415.0")  # half of 830 pixels


def test_only_what_the_gpu_ran_is_read(tmp_path: Path) -> None:
    kernel = {"cat": "kernel", "name": "gemm", "ts": 5.0, "dur": 2.5, "args": {"stream": 7}}
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 1.0, "args": {}}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [kernel, launch, {"ph": "M", "name": "x"}]}))
    assert read_kernels(tmp_path / "trace.json") == [Kernel("gemm", 7, 5.0, 7.5)]


def test_each_step_has_its_trace(tmp_path: Path) -> None:
    calls = []
    cpu = [ProfilerActivity.CPU]
    found = trace_steps(lambda: calls.append("wait"), lambda: calls.append("step"), 2, tmp_path, cpu)
    assert calls == ["wait", "step"] * 3 and found == [tmp_path / "trace-1.json", tmp_path / "trace-2.json"]
    assert all(read_kernels(path) == [] for path in found)  # a CPU launches none
