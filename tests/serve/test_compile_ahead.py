"""Kernels are compiled beside the loading of weights: of a model with the checkpoint's shapes, in threads."""

import contextlib
import dataclasses
import functools
import json
import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.models import Decoder, load_model, save_model
from octavo.nn import Linear, live_tensors, pin_codes
from octavo.ops._runtime.kernel_requests import leaves_out_launches
from octavo.serve import compile_ahead, model_choice
from octavo.serve.compile_ahead import (
    CompilerThreads,
    Job,
    compile_missing,
    compiling_ahead,
    fork_ahead,
    jobs_of,
)
from octavo.serve.engine import EngineConfig
from octavo.serve.engine import engine as engine_module
from octavo.serve.engine.model_runner import ModelRunner
from octavo.serve.engine.prompt_warm_up import plan_decodes, plan_warm_up
from octavo.serve.model_choice import load_for_inference
from octavo.serve.stand_in import build_stand_in, few_layers, has_room
from tests.serve.eager_graphs import EagerGraphs
from tests.serve.random_models import make_config, make_model

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
ASKED: dict[str, Any] = {
    "quantization": None,
    "kv_cache_dtype": "auto",
    "exact": None,
    "device": "cpu",
    "attention_dtype": "auto",
    "dtype": None,
    "kv_scales": "auto",
}


def checkpoint(folder: Path, family: str = "qwen3", recipe: str = "bf16", **overrides: Any) -> Path:
    path = folder / "m"
    save_model(make_model(family, recipe, "bf16", exact=False, **overrides), path)
    return path


@pytest.mark.parametrize(
    ("step", "dense", "num_layers", "mlp_only"),
    [(1, (), 1, ()), (2, (), 2, ()), (1, (0, 1), 3, (0, 1)), (1, (5,), 6, (5,)), (3, (2,), 6, (2,))],
)
def test_layers_up_to_the_first_of_each_kind(
    step: int, dense: tuple[int, ...], num_layers: int, mlp_only: tuple[int, ...]
) -> None:
    config = dataclasses.replace(
        make_config("qwen3_moe"), num_layers=8, decoder_sparse_step=step, mlp_only_layers=dense
    )
    few = few_layers(config)
    assert (few.num_layers, few.mlp_only_layers) == (num_layers, mlp_only)
    assert {few.has_experts(i) for i in range(few.num_layers)} == {config.has_experts(i) for i in range(8)}
    assert few_layers(make_config("llama", num_layers=5)).num_layers == 1


@pytest.mark.parametrize(
    ("family", "recipe", "asked"),
    [
        ("qwen3", "bf16", {}),
        ("qwen3", "bf16", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        ("qwen3", "blockwise", {"exact": True}),
        ("qwen3_moe", "bf16", {"quantization": "rowwise"}),
        ("gptj", "bf16", {"quantization": "tensorwise"}),
        ("llama", "bf16", {"quantization": "delayed"}),
        ("llama", "bf16", {"dtype": torch.float32}),
    ],
)
def test_it_reads_what_the_loaded_model_reads(family: str, recipe: str, asked: dict[str, Any], tmp_path: Path) -> None:
    path, asked = checkpoint(tmp_path, family, recipe), ASKED | asked
    loaded, stand_in = load_for_inference(path, **asked), build_stand_in(path, asked, CPU)
    assert (stand_in.numerics, stand_in.dtype) == (loaded.numerics, loaded.dtype)
    pin_codes(loaded)  # as an engine does
    found, wanted = ({name: (x.shape, x.dtype) for name, x in live_tensors(m).items()} for m in (stand_in, loaded))
    assert found and found == {name: wanted[name] for name in found}
    assert {name for name in wanted if ".layers" not in f".{name}"} <= set(found)
    recipes = [module.recipe for module in stand_in.modules() if isinstance(module, Linear)]
    assert set(recipes) <= {module.recipe for module in loaded.modules() if isinstance(module, Linear)}


def test_no_tensor_is_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    stand_in = build_stand_in(path, ASKED, CPU)
    assert stand_in.config.num_layers == 1
    assert stand_in.head_weight.data_ptr() == stand_in.embed_tokens.weight.data_ptr()  # once, also where they differ
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config"):
        build_stand_in(path, ASKED, CPU)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Tokens of each forward pass, and the thread that ran it."""
    found: list[tuple[int, str]] = []
    forward = Decoder.forward

    def note(self: Decoder, token_ids: torch.Tensor, context: Any = None) -> torch.Tensor:
        found.append((len(token_ids), threading.current_thread().name))
        return forward(self, token_ids, context)

    monkeypatch.setattr(Decoder, "forward", note)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"quantization": "rowwise", "exact": True},
        {"quantization": "delayed"},
        {"kv_cache_dtype": "fp8", "attention_dtype": "fp8"},
        {"kv_cache_dtype": "fp8", "kv_scales": "engine"},
        {"kv_cache_dtype": "fp8", "kv_scales": "trainer"},
    ],
    ids=lambda asked: "-".join(map(str, asked.values())),
)
def test_steps_of_every_kind_run_in_threads(
    asked: dict[str, Any], tmp_path: Path, sizes: list[tuple[int, str]]
) -> None:
    path = checkpoint(tmp_path)
    threads = CompilerThreads(lambda: build_stand_in(path, ASKED | asked, CPU), CONFIG, CPU)
    threads.finish()
    assert threads.error is None
    planned = [*plan_warm_up(4, 64), *plan_decodes(4)]  # a CPU captures nothing
    assert sorted(n for n, _ in sizes) == sorted([*(step.num_tokens for step in planned), 64])
    assert threads.num_done == len(planned) + 1
    assert all(name.startswith("octavo-compile") for _, name in sizes)


def test_decode_steps_are_those_that_will_be_captured() -> None:
    model = make_model("qwen3", "blockwise", exact=False)
    runner = LLM(model, max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=4).engine.model_runner
    graphs = EagerGraphs(runner, [1, 4], 1024)
    before = [layer.k.clone() for layer in runner.layers]
    seen: list[tuple[Any, ...]] = []
    logits = graphs._logits
    graphs._logits = lambda inputs, bound: seen.append((inputs.shape[1], bound)) or logits(inputs, bound)  # type: ignore[method-assign]
    with torch.no_grad():
        for key in graphs.missing(4, 1024):
            graphs.run_uncaptured(*key)
    assert seen == graphs.missing(4, 1024) == [(4, 512), (1, 512), (4, 1024), (1, 1024)]
    assert all(torch.equal(layer.k, held) for layer, held in zip(runner.layers, before, strict=True))


def test_they_are_among_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    class Graphs:
        def missing(self, most: int, longest: int) -> list[tuple[int, int]]:
            return [(most, longest)]

        def run_uncaptured(self, *key: int) -> None:
            ran.append(key)

    class Mixed:
        def missing(self, *, sparse: bool) -> list[tuple[int, int]]:
            return [(64, 2)]

        def run_uncaptured(self, key: tuple[int, int]) -> None:
            ran.append(key)

    init = ModelRunner.__init__

    def with_graphs(self: ModelRunner, *given: Any) -> None:
        init(self, *given)
        self.graphs, self.mixed_graphs = Graphs(), Mixed()  # type: ignore[assignment]

    monkeypatch.setattr(ModelRunner, "__init__", with_graphs)
    model = make_model("qwen3", "blockwise", exact=False, max_position_embeddings=4096)
    for max_len, expected in ((2048, 2048), (10_000, 4096)):
        with torch.no_grad():
            for job in jobs_of(model, CONFIG, max_len)[-2:]:
                job.run()
        assert ran[-2:] == [(64, 2), (4, expected)]


@pytest.mark.parametrize("fails", ["first", "later", "build"])
def test_what_fails_is_logged_once_and_the_rest_goes_on(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []

    def job(number: int) -> None:
        if fails == "first" or number in (2, 3):
            raise ValueError(f"no kernel {number}")
        done.append(number)

    def build() -> Any:
        if fails == "build":
            raise CheckpointError("no config")

    monkeypatch.setattr(compile_ahead, "jobs_of", lambda *_: [Job(i, functools.partial(job, i)) for i in range(6)])
    threads = CompilerThreads(build, CONFIG, CPU)
    threads.finish()
    assert sorted(done) == ([0, 1, 4, 5] if fails == "later" else [])
    assert threads.num_done == len(done) and threads.error is not None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "compiled when they are needed" in line and str(threads.error) in line


def test_an_early_end_waits_for_what_has_begun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def job(number: int) -> None:
        begun.set()
        assert go_on.wait(30)
        done.append(number)

    monkeypatch.setattr(compile_ahead, "jobs_of", lambda *_: [Job(i, functools.partial(job, i)) for i in range(6)])
    threads = CompilerThreads(lambda: None, CONFIG, CPU)  # type: ignore[arg-type,return-value]
    assert begun.wait(30)
    threading.Timer(0.2, go_on.set).start()
    threads.finish(early=True)
    assert done == [0]


class FakeProcesses:
    """Notes what it is told, in the list of the steps."""

    def __init__(self, told: list[str], num_asked: int = 0) -> None:
        self.told, self.num_asked = told, num_asked

    def compile(self, request: Any) -> None:
        raise AssertionError("a CPU asks for no kernel")

    def wait(self) -> int:
        self.told.append("wait")
        return 7

    def close(self) -> None:
        self.told.append("close")


@pytest.mark.parametrize("warm_up", [True, False])
def test_steps_run_without_their_kernels_until_processes_have_compiled_them(
    warm_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time: what a step makes of the zeros that it then meets is no error."""
    knobs = pytest.importorskip("triton", reason="triton is only packaged for Linux").knobs
    told: list[str] = []

    def job(number: int) -> None:
        is_left_out = knobs.runtime.jit_cache_hook is not None and not torch.empty(3).any()
        told.append(f"{number}{' without' if is_left_out else ''}")
        if is_left_out:
            raise ValueError("zeros")

    jobs = [Job(number, functools.partial(job, number), number == 301) for number in (1, 256, 300, 301)]
    monkeypatch.setattr(compile_ahead, "jobs_of", lambda *_: jobs)
    monkeypatch.setattr(compile_ahead, "NUM_THREADS", 1)
    config = dataclasses.replace(CONFIG, warm_up=warm_up)

    def build() -> Any:
        told.append(f"build{' without' if leaves_out_launches() else ''}")

    threads = CompilerThreads(build, config, CPU, processes=FakeProcesses(told))  # type: ignore[arg-type]
    threads.finish()
    left_out = ["1 without", "256 without", *(["300 without"] if warm_up else []), "301 without"]
    assert told == ["build without", *left_out, "wait", "close", "1", "256", "300", "301"]
    assert threads.error is None and threads.num_compiled == 7 and threads.num_done == 4


def test_an_engines_full_step_is_waited_for_without_a_warm_up() -> None:
    """It is made with the engine, and has kernels of its own."""
    with torch.no_grad():
        jobs = jobs_of(make_model("qwen3", "blockwise", exact=False), CONFIG, 2048)
    assert [job.num_tokens for job in jobs if job.is_of_start] == [CONFIG.max_num_batched_tokens]


class FakeKernelList:
    """Notes what it is asked, in the list of the steps."""

    def __init__(self, told: list[Any], is_there: bool = False) -> None:
        self.told, self.is_there = told, is_there

    def is_complete(self) -> bool:
        self.told.append("list")
        return self.is_there

    def write(self, entries: set[str]) -> None:
        self.told.append(entries)


@pytest.mark.parametrize(
    ("num_errors", "num_asked", "met", "is_written"),
    [(0, 7, {"norm"}, True), (2, 7, {"norm"}, False), (0, 8, {"norm"}, False), (0, 7, set(), False)],
    ids=["all", "errors", "not_compiled", "none_met"],
)
def test_a_list_is_written_of_what_is_known_to_be_all(
    num_errors: int,
    num_asked: int,
    met: set[str],
    is_written: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = pytest.importorskip("octavo.ops._runtime.kernel_requests.triton")
    monkeypatch.setattr(requests, "requesting_kernels", lambda _: contextlib.nullcontext(met))
    caplog.set_level(logging.INFO)
    told: list[Any] = []
    first: list[int] = []

    def job(number: int) -> None:
        if number < num_errors and number not in first:
            first.append(number)
            raise ValueError("zeros")

    monkeypatch.setattr(compile_ahead, "jobs_of", lambda *_: [Job(i, functools.partial(job, i)) for i in range(4)])
    processes, kernels = FakeProcesses(told, num_asked), FakeKernelList(told)
    threads = CompilerThreads(lambda: None, CONFIG, CPU, processes=processes, kernels=kernels)  # type: ignore[arg-type,return-value]
    threads.finish()
    assert told == ["wait", "close", *([met] if is_written else [])]
    assert threads.error is None and threads.num_done == 4
    lines = [record for record in caplog.records if "ended early" in record.getMessage()]
    assert [record.levelno for record in lines] == [logging.INFO] * bool(num_errors)
    assert all("ValueError: zeros" in record.getMessage() for record in lines)


def test_no_list_is_written_where_a_stand_in_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels that it met until then."""
    requests = pytest.importorskip("octavo.ops._runtime.kernel_requests.triton")
    monkeypatch.setattr(requests, "requesting_kernels", lambda _: contextlib.nullcontext({"quantize"}))
    told: list[Any] = []
    processes, kernels = FakeProcesses(told, 7), FakeKernelList(told)
    CompilerThreads(lambda: 1 // 0, CONFIG, CPU, processes=processes, kernels=kernels).finish()  # type: ignore[arg-type,return-value]
    assert told == ["wait", "close"]


@pytest.mark.parametrize(
    ("device", "warm_up", "free_bytes"),
    [("cuda", True, 1 << 40), ("cuda", False, 1 << 40), ("cpu", True, 1 << 40), ("cuda", True, 1 << 30)],
)
def test_kernels_of_a_model_in_memory_are_compiled_before_its_engine_is_made(
    device: str, warm_up: bool, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in: steps without their kernels would leave zeros in what the model keeps."""
    told: list[str] = []

    def processes_for(place: torch.device, *, at_once: bool) -> FakeProcesses:
        assert place.type == "cuda" and not at_once
        return FakeProcesses(told)

    model = make_model("qwen3", "blockwise", exact=False)
    monkeypatch.setattr(Decoder, "device", property(lambda _: torch.device(device)))
    monkeypatch.setattr(compile_ahead, "processes_for", processes_for)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, free_bytes))
    monkeypatch.setattr(compile_ahead, "stand_in_of", lambda *given: given)
    of = model.config, model.numerics, torch.bfloat16, torch.device("cuda")
    steps = {of: [Job(1, lambda: told.append("step"))]}
    monkeypatch.setattr(compile_ahead, "jobs_of", lambda stand_in, *_: steps[stand_in])
    monkeypatch.setattr(compile_ahead, "_current", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(compile_ahead, "use_checked_cache", lambda place: told.append(f"checked {place.type}"))
    compile_missing(model, dataclasses.replace(CONFIG, warm_up=warm_up))
    is_done = device == "cuda" and warm_up and free_bytes > 1 << 33
    assert told == (["checked cuda", "step", "wait", "close"] if is_done else [])


def test_it_is_part_of_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("octavo.serve.llm.compile_missing", lambda model, config: told.append((model, config)))
    model = make_model("qwen3", "blockwise", exact=False)
    llm = LLM(model, max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=4)
    assert told == [(model, llm.engine.config)]


def test_an_end_amid_it_does_not_wait_for_processes() -> None:
    told: list[str] = []
    threads = CompilerThreads(lambda: 1 // 0, CONFIG, CPU, processes=FakeProcesses(told))  # type: ignore[arg-type,return-value]
    threads.abort()
    assert "close" in told and threads.num_done == 0


class FakeThreads:
    """Notes when it began and how it ended."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def begin(
        self, build: Any, config: EngineConfig, device: torch.device, *, processes: Any, kernels: Any
    ) -> "FakeThreads":
        assert isinstance(processes, FakeProcesses) and isinstance(kernels, FakeKernelList)
        self.told.append(f"begin {device.type}")
        return self

    def finish(self, *, early: bool = False) -> None:
        self.told.append(f"finish early={early}")

    def abort(self) -> None:
        self.told.append("abort")


def fake_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int = 1 << 40, is_complete: bool = False) -> list[Any]:
    """What a start on it is told, in order."""
    told: list[Any] = []

    def told_of(what: str, value: Any) -> Any:
        told.append(what)
        return value

    def kernel_list(path: Path, asked: dict[str, Any], config: EngineConfig, device: torch.device) -> FakeKernelList:
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: no config.json")
        assert asked.keys() == ASKED.keys() and config.max_num_seqs == 4 and device.type == "cuda"
        return FakeKernelList(told, is_complete)

    monkeypatch.setattr(compile_ahead, "chosen_device", torch.device)
    monkeypatch.setattr(compile_ahead, "use_checked_cache", lambda device: told.append("checked"))
    monkeypatch.setitem(sys.modules, "octavo.serve.kernel_list", types.SimpleNamespace(KernelList=kernel_list))

    @contextlib.contextmanager
    def preparing_triton() -> Iterator[None]:
        told.append("triton")
        yield
        told.append("prepared")

    requests = types.SimpleNamespace(preparing_triton=preparing_triton)
    monkeypatch.setitem(sys.modules, "octavo.ops._runtime.kernel_requests.triton", requests)
    memory = free_bytes, free_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: told_of("memory", memory))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compile_ahead, "processes_for", lambda _: told_of("processes", FakeProcesses(told)))
    monkeypatch.setattr(compile_ahead, "CompilerThreads", FakeThreads(told).begin)
    return told


# the processes are a fork, which is to have no context on the GPU: asking for its memory makes one
PREPARED = ["triton", "memory", "prepared"]
BEGUN = ["checked", "list", "processes", *PREPARED, "begin cuda"]


@pytest.mark.parametrize(
    ("device", "warm_up", "free_bytes", "is_complete", "expected"),
    [
        ("cpu", True, 1 << 40, False, ["load"]),
        ("cuda", True, 1 << 40, False, [*BEGUN, "load", "finish early=False"]),
        ("cuda", False, 1 << 40, False, [*BEGUN, "load", "finish early=True"]),
        ("cuda", True, 1 << 33, False, [*BEGUN[:-1], "close", "load"]),
        ("cuda", True, 1 << 40, True, ["checked", "list", *PREPARED, "load"]),
    ],
    ids=["cpu", "gpu", "no_warm_up", "no_room", "all_there"],
)
def test_it_begins_before_the_weights_and_ends_after_them(
    device: str,
    warm_up: bool,
    free_bytes: int,
    is_complete: bool,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = fake_gpu(monkeypatch, free_bytes, is_complete)
    config = dataclasses.replace(CONFIG, warm_up=warm_up)
    with compiling_ahead(checkpoint(tmp_path), ASKED | {"device": device}, config):
        told.append("load")
    assert told == expected


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_server_forks_its_processes_before_it_has_threads(
    is_complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint takes them; where all kernels are there, they end."""
    told = fake_gpu(monkeypatch, is_complete=is_complete)
    fork_ahead(CPU)
    assert told == []
    fork_ahead(torch.device("cuda"))
    assert told == ["processes"]
    path = checkpoint(tmp_path)
    for first in (True, False):
        told.clear()
        with compiling_ahead(path, ASKED | {"device": "cuda"}, CONFIG):
            told.append("load")
        own = [*PREPARED, *["close"] * first] if is_complete else BEGUN[2 + first :]
        assert told == ["checked", "list", *own, "load", *([] if is_complete else ["finish early=False"])]


def test_an_error_of_loading_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = fake_gpu(monkeypatch)
    path, asked = checkpoint(tmp_path), ASKED | {"device": "cuda"}
    with pytest.raises(CheckpointError, match="damaged"), compiling_ahead(path, asked, CONFIG):
        raise CheckpointError("damaged")
    assert told == [*BEGUN, "abort"]
    told.clear()
    with compiling_ahead(tmp_path / "nothing", asked, CONFIG):  # to load raises what is wrong with it
        pass
    assert told == ["checked"]


@pytest.mark.parametrize(
    ("asked", "least_gib"), [({}, 138), ({"quantization": "fp8"}, 78), ({"dtype": torch.float32}, 270)]
)
def test_room_is_left_for_the_weights(asked: dict[str, Any], least_gib: int, tmp_path: Path) -> None:
    fields = {"vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_heads": 64, "head_dim": 128}
    config = make_config("llama", num_layers=80, num_kv_heads=8, **fields)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert not has_room(tmp_path, ASKED | asked, least_gib << 30)
    assert has_room(tmp_path, ASKED | asked, (least_gib + 32) << 30)


def test_a_checkpoint_is_loaded_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stand-in cannot be made: what no kernel was compiled for works."""
    path, begun = checkpoint(tmp_path), list[CompilerThreads]()

    def begin(build: Any, config: EngineConfig, _: torch.device, **told: Any) -> CompilerThreads:
        begun.append(CompilerThreads(build, config, CPU))
        return begun[-1]

    fake_gpu(monkeypatch)
    monkeypatch.setattr(compile_ahead, "chosen_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(compile_ahead, "CompilerThreads", begin)
    monkeypatch.setattr(compile_ahead, "build_stand_in", lambda *_: 1 // 0)
    llm = LLM(path, max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=4, device="cpu")
    assert isinstance(begun[0].error, ZeroDivisionError)
    expected = LLM(load_model(path), max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=4)
    params = SamplingParams(max_tokens=4, temperature=0)
    found = [each.generate([[1, 2, 3]], params)[0].outputs[0].token_ids for each in (llm, expected)]
    assert found[0] == found[1]


def test_kernels_on_disk_are_checked_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = checkpoint(tmp_path), list[Any]()
    for module in (model_choice, engine_module):
        monkeypatch.setattr(module, "use_checked_cache", told.append)
    load = model_choice.load_model
    monkeypatch.setattr(
        model_choice, "load_model", lambda *given, **named: told.append("load") or load(*given, **named)
    )
    LLM(path, max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=4, device="cpu")
    assert told == [CPU, "load", CPU]  # the engine's may be of a model that was given
