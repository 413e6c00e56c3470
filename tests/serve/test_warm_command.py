"""octavo warm: compiles for the GPU that is there, by config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli import load_command
from octavo.errors import CheckpointError
from octavo.ops._runtime.kernel_cache import triton as kernel_cache
from octavo.serve import compile_ahead
from octavo.serve.compile_ahead import CompilerThreads
from tests.conftest import RunOctavo
from tests.serve.random_models import make_config

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's, without its weights."""
    (tmp_path / "config.json").write_text(json.dumps(make_config("qwen3", num_layers=3).to_hf()))
    return tmp_path


def test_without_a_gpu_there_is_nothing_to_compile_for(folder: Path, run_octavo: RunOctavo) -> None:
    ended = run_octavo("warm", folder, "--device", "cpu")
    assert ended.code == 2 and "there is none to compile for" in ended.err
    ended = run_octavo("warm", folder, "--quantization", "fp9")
    assert ended.code == 2 and "fp9" in ended.err


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the threads were told; they work on the CPU."""
    told: dict[str, Any] = {}

    class OnCpu(CompilerThreads):
        def __init__(self, build: Any, config: Any, device: torch.device, max_len: int, *compiled: Any) -> None:
            told.update(config=config, device=device, max_len=max_len, processes=compiled[0], kernels=compiled[1])
            super().__init__(build, config, CPU, max_len)

    build = __import__("octavo.serve.stand_in", fromlist=["x"]).build_stand_in
    monkeypatch.setattr("octavo.cli.warm.chosen_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("octavo.serve.stand_in.build_stand_in", lambda path, asked, _: build(path, asked, CPU))
    monkeypatch.setattr(compile_ahead, "CompilerThreads", OnCpu)
    monkeypatch.setattr(compile_ahead, "processes_for", lambda device: f"processes of {device}")
    monkeypatch.setattr(kernel_cache, "use_checked_cache", lambda: told.update(is_checked=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return told


def test_it_says_what_was_compiled_and_where_it_is(
    folder: Path, as_on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "kernels"))
    ended = run_octavo("warm", folder, "--quantization", "fp8", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("H200: 0 kernels compiled and 0 found, over 16 steps in ")
    assert ended.out.strip().endswith(f"they are in {folder / 'kernels'}")
    assert as_on_a_gpu["processes"] == "processes of cuda"
    assert as_on_a_gpu["is_checked"] and as_on_a_gpu["config"].max_num_seqs == 4
    assert as_on_a_gpu["max_len"] > 1 << 20 and as_on_a_gpu["device"].type == "cuda"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--kv-scales", "engine", "--attention-dtype", "fp8"),
        ("--exact", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager"),
    ],
    ids=["plain", "fp8", "others"],
)
def test_serve_looks_for_the_list_that_it_writes(
    options: tuple[str, ...],
    folder: Path,
    as_on_a_gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    run_octavo: RunOctavo,
) -> None:
    from octavo.serve.kernel_list import KernelList

    sizes = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    assert run_octavo("warm", folder, *options, *sizes).code == 0

    def load(path: Path, asked: dict[str, Any], config: Any) -> None:
        as_on_a_gpu["served"] = KernelList(path, asked, config, torch.device("cuda"))
        raise CheckpointError("there are no weights")

    monkeypatch.setattr("octavo.serve.llm.compiling_ahead", load)
    monkeypatch.setattr("octavo.serve.http.run_server", lambda build, *_: build())
    ended = run_octavo("serve", folder, *options, *sizes, "--num-kv-pages", "4")
    assert "there are no weights" in ended.err
    assert as_on_a_gpu["served"].file == as_on_a_gpu["kernels"].file


def test_what_does_not_compile_is_an_error(
    folder: Path, as_on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compile_ahead, "run_full_step", fail)
    ended = run_octavo("warm", folder, "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    assert ended.code == 2 and "not all kernels could be compiled: no such instruction" in ended.err


def test_its_options_are_those_of_serve() -> None:
    def options_of(name: str) -> dict[str, Any]:
        return {p.name: (p.opts, p.default, getattr(p, "help", "")) for p in load_command(name).params}

    warm, serve = options_of("warm"), options_of("serve")
    assert warm == {name: serve[name] for name in warm}


def test_a_pasted_command_line_of_serve_is_told_what_to_leave_out(folder: Path, run_octavo: RunOctavo) -> None:
    known = ("--kv_cache_dtype", "fp8", "--max-num-seqs=4")
    ended = run_octavo("warm", folder, "--port", "9000", *known, "-tp", "2", "--api-key=k", "--no-warm-up", "--port=1")
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert ended.err.strip().endswith("; leave out --port, --tensor-parallel-size, --api-key, --no-warm-up")
    assert "there is none to compile for" in run_octavo("warm", folder, *known, "--device", "cpu").err
    assert "No such option: --prot" in run_octavo("warm", folder, "--prot", "1").err
