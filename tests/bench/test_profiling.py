"""The profile's arithmetic on kernels made by hand, the names of octavo's own kernels, and toy runs on a CPU."""

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import profiling
from bench.clocks import ClockSamples, add_clocks
from bench.profiling import session
from bench.profiling.cold_start import ColdProfile
from bench.profiling.kernels import Kernel, Watched, watch
from bench.profiling.kinds import OTHER, OURS, kind_of
from bench.profiling.layer import Layer, average_layer, format_floors, layer_floors
from bench.profiling.step_profile import Profile, Share
from bench.record import Record
from bench.serve.shapes import QWEN3_8B, QWEN3_30B_A3B
from bench.serve.workloads import VARIANTS
from bench.speed.ceilings import Ceilings
from octavo.errors import BackendError, ConfigError
from tests.assertions import assert_raises
from tests.bench.quick import options

OPS = Path(__file__).parents[2] / "octavo" / "ops"
# Functions that a kernel takes as a constant: they are compiled into it and never launched.
PASSED_TO_KERNELS = {"gelu_at", "load_as_bf16", "load_values", "norm_at", "swiglu_at", "zero_centered_norm_at"}
FP8_KV = VARIANTS["fp8-kv"].numerics("blockwise")
CEILINGS = Ceilings(bf16_flops=0.783e15, fp8_flops=1.52e15, copy_bytes=4.116e12)
# Two steps of two streams: 10 to 30 and 20 to 50 overlap, a long one hides two, one begins where another ends.
KERNELS = [
    Kernel("attend_tiles", 7, 10, 30),
    Kernel("nvjet_a", 8, 20, 50),
    Kernel("attend_tiles", 7, 52, 152),
    Kernel("nvjet_a", 8, 60, 70),
    Kernel("Memset (Device)", 7, 152, 153),
    Kernel("nvjet_b", 7, 653, 703),
]


def made(kernels: list[Kernel], wall_us: float = 1000.0) -> Profile:
    return Profile("a step", Watched(kernels, wall_us), num_steps=2)


def test_time_with_a_kernel_counts_once_and_gaps_are_what_is_left() -> None:
    profile = made(KERNELS)
    assert profile.sum_ms == pytest.approx((20 + 30 + 100 + 10 + 1 + 50) / 2e3)
    assert profile.busy_ms == pytest.approx((40 + 101 + 50) / 2e3)
    assert profile.gaps() == [Share("1.5 to 2.5 us", 0.5, 0.001), Share("over 200 us", 0.5, 0.25)]
    span_ms = (703 - 10) / 2e3
    assert profile.busy_ms + sum(gap.ms for gap in profile.gaps()) == pytest.approx(span_ms)
    assert made(KERNELS[:1]).gaps() == made([]).gaps() == [] and made([]).busy_ms == 0


def test_shares_are_of_one_step_the_longest_first() -> None:
    profile = made(KERNELS)
    assert profile.shares(str)[:2] == [Share("attend_tiles", 1.0, 0.06), Share("nvjet_b", 0.5, 0.025)]
    assert [(share.name, share.number) for share in profile.shares(kind_of)] == [
        *(("attention", 1.0), ("GEMM, library", 1.5), ("copy, fill", 0.5)),
    ]
    said = profile.format(num_rows=1)
    assert "wall 0.500 ms, busy 0.096 ms (19.1%), sum of kernels 0.105 ms, 3 launches" in said
    assert "nvjet_b" not in said and [line.split() for line in said.splitlines() if line.startswith("attend")] == [
        ["attend_tiles", "0.060", "1.0", "60.00", "56.9%"]
    ]
    assert "0 launches" in made([]).format()


def test_a_document_holds_every_kernel_with_its_kind() -> None:
    document = json.loads(json.dumps(made(KERNELS).document()))
    assert document["busy_ms"] == pytest.approx(0.0955) and document["num_steps"] == 2
    assert [kernel["kind"] for kernel in document["kernels"]] == [kind_of(k["name"]) for k in document["kernels"]]
    assert sum(kernel["ms"] for kernel in document["kernels"]) == pytest.approx(document["sum_ms"])
    assert sum(kind["ms"] for kind in document["kinds"]) == pytest.approx(document["sum_ms"])


def test_the_average_layer_is_of_those_that_are_alike() -> None:
    def layer(start: float, us: float, *extra: str) -> list[Kernel]:
        names = ("qkv_rows", *extra, "gemm")
        return [Kernel(name, 7, start + 100 * i, start + 100 * i + us) for i, name in enumerate(names)]

    kernels = [*layer(0, 10), *layer(200, 30), *layer(400, 20, "Memset"), Kernel("qkv_rows", 7, 700, 701)]
    found = average_layer(kernels, "qkv_rows")
    assert found == Layer((("qkv_rows", 20.0, 80.0), ("gemm", 20.0, 80.0)), num_alike=2, num_layers=3)
    lines = [line.split() for line in found.format(str).splitlines()]
    assert lines[-1] == ["sum", "40.00", "160.00"] and lines[0][:6] == ["one", "layer", "(2", "of", "3", "alike)"]
    assert average_layer(kernels[:2], "qkv_rows") is None


def test_floors_are_bytes_and_operations_of_a_layers_parts() -> None:
    """Worked out by hand for 512 sequences of 1561 tokens; a layer of experts meets nearly all with 256 tokens."""
    dense = {f.name: f for f in layer_floors(QWEN3_8B, FP8_KV, 512, 1561, CEILINGS)}
    assert dense["attention"].num_bytes == 2 * 512 * 1561 * 8 * (128 + 4)
    assert dense["down"].flops == 2 * 512 * 4096 * 12288
    assert dense["down"].num_bytes == 4096 * 12288 + 512 * (12288 + 2 * 4096)
    us = {name: (round(f.moving_us, 1), round(f.product_us, 1)) for name, f in dense.items()}
    assert us == {
        "QKV projection": (8.2, 17.0),
        "attention": (410.1, 16.7),
        "output projection": (5.6, 11.3),
        "gate and up": (31.1, 67.8),
        "down": (14.8, 33.9),
    }
    assert format_floors(list(dense.values())).splitlines()[-1].split()[-1] == "540.08"  # by hand: the larger of each
    experts = {f.name: f for f in layer_floors(QWEN3_30B_A3B, FP8_KV, 256, 1029, CEILINGS)}
    assert (round(experts["experts' down"].moving_us, 1), round(experts["router"].moving_us, 2)) == (51.3, 0.13)
    bf16 = layer_floors(QWEN3_8B, VARIANTS["bf16"].numerics("blockwise"), 512, 1561, CEILINGS)[-1]
    assert bf16.num_bytes == 2 * 4096 * 12288 + 512 * (2 * 12288 + 2 * 4096)
    assert bf16.product_us == pytest.approx(dense["down"].product_us * 1.52 / 0.783)


def test_every_kernel_of_octavo_has_a_kind_and_no_other_name_has() -> None:
    kernels, helpers = launched_and_called()
    assert kernels >= PASSED_TO_KERNELS, "a name of the short list is gone"
    ours = [name for names in OURS.values() for name in names.split()]
    assert sorted(ours) == sorted(kernels - PASSED_TO_KERNELS), "bench/profiling/kinds.py and octavo.ops differ"
    assert not {kind_of(name) for name in ours} - set(OURS) and "load_tile" in helpers


def launched_and_called() -> tuple[set[str], set[str]]:
    """Names of octavo.ops' Triton functions: those that no other one calls, and those that one does."""
    made, called = set(), set()
    for path in OPS.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = ".".join(path.relative_to(OPS.parents[1]).with_suffix("").parts).removesuffix(".__init__")
        origin = {
            name.asname or name.name: (node.module, name.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                made.add((module, node.name))
                names = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                called |= {origin.get(name, (module, name)) for name in names}
    return {name for _, name in made - called}, {name for _, name in made & called}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNN", "GEMM, library"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention, library"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*)", "elementwise, reduction, index"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(const*)", "attention, library"),
        ("Memcpy HtoD (Pinned -> Device)", "copy, fill"),
        ("ncclDevKernel_AllGather_RING_LL", "between GPUs"),
        ("triton_poi_fused_add_0", "torch.compile"),
        ("forward_tiles_of_another_library", OTHER),
    ],
)
def test_kinds_of_libraries_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_clocks_are_medians_of_the_whole_samples() -> None:
    samples = "1980, 400.5, Not Active\n1500, 699.0, Active\n1700, 650.0, Active\n[N/A], 1, Active\n15"
    found = ClockSamples()
    found.read(samples)
    assert found.figures() == {
        "SM clock, MHz": 1700.0,
        "SM clock, lowest": 1500.0,
        "power, W": 650.0,
        "power, highest": 699.0,
        "share of the time at the power cap": pytest.approx(2 / 3),
    }
    record = Record("x", "what", device="cpu")
    add_clocks(record, "a case", [found, ClockSamples()])
    rows = [(row["metric"], row["value"], row["p20"], row["p80"], row["unit"]) for row in record.rows]
    assert rows == [("SM clock", 1700.0, 1580.0, 1868.0, "MHz"), ("power", 650.0, 500.3, 679.4, "W")]


def test_no_sample_makes_no_figure() -> None:
    record = Record("x", "what", device="cpu")
    add_clocks(record, "a case", [ClockSamples()])
    assert (ClockSamples().figures(), record.rows) == ({}, [])


def test_what_runs_in_a_block_is_read_in_order() -> None:
    x = torch.ones(8, 8)
    with watch("cpu") as watched:
        x.add(x).mm(x)
    x.sub(x)
    names = [kernel.name for kernel in watched.kernels]
    assert names.index("aten::add") < names.index("aten::mm") and "aten::sub" not in names
    assert 0 < sum(k.us for k in watched.kernels if k.name in ("aten::add", "aten::mm")) < watched.wall_us


def run(folder: Path, name: str, **fields: Any) -> list[dict[str, Any]]:
    """The profiles of a toy's workload, one layer and one step where it has a choice."""
    asked = dataclasses.replace(
        options(folder, workloads=(name,), **fields), layers=1, passes=1, recipes=("blockwise",)
    )
    assert profiling.run(asked)
    document = json.loads((folder / f"profile-{name}.json").read_text())
    assert document["commit"] == "abc" and document["torch"] == torch.__version__ and document["ceilings"]
    profiles: list[dict[str, Any]] = document["profiles"]
    return profiles


@pytest.mark.parametrize("name", ["decode-8b", "mixed-8b", "decode-30b", "single"])
def test_decode_steps_have_floors_of_their_layers(name: str, tmp_path: Path) -> None:
    [profile] = run(tmp_path, name)
    num_seqs = 1 if name == "single" else 4
    assert f"(1 layers): octavo blockwise + FP8 KV, decode of {num_seqs} x " in profile["title"]
    assert 0 < profile["busy_ms"] <= min(profile["sum_ms"], profile["wall_ms"])
    assert [floor["name"] for floor in profile["floors"]][-1] == ("experts' down" if "30b" in name else "down")
    assert profile["figures"]["tokens/s"] > 0
    calls = {kernel["name"]: kernel["number"] for kernel in profile["kernels"]}
    assert calls["aten::scaled_dot_product_attention"] == 1  # one layer, one step


def test_an_average_layer_is_found_in_a_toys_steps(tmp_path: Path) -> None:
    asked = options(tmp_path, workloads=("single",), variants=("bf16",))
    assert profiling.run(asked)
    [profile] = json.loads((tmp_path / "profile-single.json").read_text())["profiles"]
    assert profile["num_steps"] == 2 and profile["layer"]["num_layers"] == 3  # from one layer's attention to the next's
    assert profile["layer"]["kernels"][0][0] == "aten::scaled_dot_product_attention"


def test_prompts_have_a_profile_a_size(tmp_path: Path) -> None:
    profiles = run(tmp_path, "prefill")
    assert [profile["title"].partition(": ")[0] for profile in profiles] == [
        *("prefill, toy of Qwen3-8B (1 layers)",) * 2,
        "prefill, toy of Qwen3-30B-A3B (1 layers)",
        "prefill, toy of Qwen3-8B (1 layers)",
    ]
    assert "exact" in profiles[-1]["title"] and all(profile["figures"]["floor, ms"] > 0 for profile in profiles)


def test_a_training_step_has_the_optimizer_that_was_asked_for(tmp_path: Path) -> None:
    fp8, torchs, bf16 = run(tmp_path, "step", variants=("fp8-adamw", "torch-adamw", "bf16"))
    assert fp8["title"].endswith("octavo blockwise, FP8 AdamW") and bf16["title"].endswith("octavo bf16, FP8 AdamW")
    assert torchs["title"].endswith("octavo blockwise, torch's AdamW")
    assert all(0 < p["busy_ms"] <= p["wall_ms"] and p["figures"]["floor, ms"] > 0 for p in (fp8, torchs, bf16))


def test_a_reinforcement_step_has_a_profile_a_phase(tmp_path: Path) -> None:
    profiles = run(tmp_path, "rl-step", variants=("bf16",))
    assert [p["title"].partition(",")[0] for p in profiles] == ["sampling", "scoring", "learning", "refit"]
    sampling, _, learning, _ = ({kernel["name"] for kernel in profile["kernels"]} for profile in profiles)
    backward = {name for name in learning if "Backward" in name}
    assert backward and not backward & sampling and all("without the profiler, ms" in p["figures"] for p in profiles)


@pytest.mark.largest
def test_a_cold_start_has_its_stages(tmp_path: Path) -> None:
    [profile] = run(tmp_path, "cold-start")
    assert list(profile["stages"])[:4] == ["interpreter and imports", "checkpoint", "engine", "first token"]
    assert all(seconds > 0 for seconds in profile["stages"].values()) and profile["compilations"] == []


def test_compilations_are_listed_the_longest_first() -> None:
    said = ColdProfile("a start", {"engine": 2.0}, [("row_tiles", 0.5), ("attend_tiles", 1.5)]).format()
    rows = [line.split() for line in said.splitlines()]
    assert rows[-3:] == [
        [*["2", "Triton", "compilations,", "of", "that", "2.00"]],
        ["attend_tiles", "1.50"],
        ["row_tiles", "0.50"],
    ]


def test_what_no_profile_has_is_refused(tmp_path: Path) -> None:
    for fields in ({"scale": 0.5}, {"time_limit_s": 9.0}):
        assert_raises(ConfigError, "octavo bench profile takes --workload", profiling.run, options(tmp_path, **fields))
    filtered = dataclasses.replace(options(tmp_path), filters=("x",))
    assert_raises(ConfigError, "leave other options out", profiling.run, filtered)
    assert_raises(ConfigError, "--workload must be one of", profiling.run, options(tmp_path, workloads=("train",)))
    asked = options(tmp_path, workloads=("step",), variants=("fp8-kv",))
    assert_raises(ConfigError, "--workload step must be one of fp8-adamw, torch-adamw, bf16", profiling.run, asked)


def test_a_variant_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys) -> None:
    def profile(_settings: object, _name: str, variant: str) -> Iterator[Profile]:
        if variant == "bf16":
            raise BackendError("no memory")
        yield made(KERNELS)

    monkeypatch.setitem(session.PARTS, "single", session.PARTS["single"]._replace(profile=profile))
    assert not profiling.run(options(tmp_path, workloads=("single",), variants=("bf16", "fp8-kv")))
    assert "COMPLAINT: single, bf16: BackendError: no memory" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "profile-single.json").read_text())["profiles"]) == 1


def test_a_step_that_leaves_a_sequence_out_is_no_steady_one(tmp_path, capsys) -> None:
    asked = dataclasses.replace(options(tmp_path, workloads=("single",), variants=("bf16",)), passes=40)
    assert not profiling.run(asked)
    assert "--passes asks for more steps than there are tokens" in capsys.readouterr().out
