"""What a step would have to wait for is got ready before: on request, or while nothing runs."""

import logging
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.numerics import Numerics, get_recipe
from octavo.ops.gemm.scaled_mm import unpadded_rows
from octavo.ops.gemm.skinny_mm import MAX_TOKENS
from octavo.serve.engine import Engine, graph_capture
from octavo.serve.engine import engine as engine_module
from octavo.serve.engine.decode_graphs import DecodeGraphs, batch_sizes
from octavo.serve.engine.loop import EngineLoop
from octavo.serve.engine.prompt_warm_up import WarmUpStep, plan_decodes, plan_warm_up
from octavo.serve.engine.request import RequestInput
from tests.serve.random_models import make_model, random_prompts

prepare = Engine.prepare  # conftest.py takes it away from tests on a GPU


def make_graphs(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_model_len: int) -> DecodeGraphs:
    """Graphs that nobody captures: their keys stand for them."""
    graphs = object.__new__(DecodeGraphs)
    graphs.batch_sizes = batch_sizes(max_num_seqs, Numerics())
    graphs.max_model_len, graphs._captured, graphs.obstacle = max_model_len, {}, None
    graphs._num_covered = Counter()
    graphs.model = make_model("llama", "bf16", device=torch.device("cpu"))
    graphs._recorder = SimpleNamespace(clear=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, key: key)
    monkeypatch.setattr(DecodeGraphs, "_run_once", lambda self, step: None)
    return graphs


@pytest.mark.parametrize(
    ("num_rows", "longest", "wanted"),
    [
        (1, 100, {(1, 512)}),
        (3, 513, {(n, bound) for n in (1, 2, 4) for bound in (512, 1024)}),
        (9, 5000, {(n, bound) for n in (1, 2, 4, 8, 12) for bound in (512, 1024, 1300)}),
    ],
)
def test_every_step_of_that_size_finds_its_graph(
    num_rows: int, longest: int, wanted: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = make_graphs(monkeypatch, 12, 1300)
    while graphs.prepare_next(num_rows, longest):
        pass
    assert set(graphs._captured) == wanted
    for rows in range(1, num_rows + 1):
        for length in (1, 512, min(longest, 1300)):
            assert graphs.find(rows, length) in wanted
    assert set(graphs._captured) == wanted


@pytest.mark.parametrize("most", [1, 5, 33, 238, 256, 512, 1000])
def test_sizes_need_no_padding_in_fp8(most: int) -> None:
    blockwise = get_recipe("blockwise")
    every = (Numerics(), Numerics(blockwise), Numerics(blockwise, exact=True))
    bf16, fp8, exact = (batch_sizes(most, numerics) for numerics in every)
    assert bf16[-1] == most
    assert all(size == unpadded_rows(size, exact=False) for size in fp8 if size > MAX_TOKENS)
    assert all(size == unpadded_rows(size, exact=True) for size in exact if size > MAX_TOKENS)
    for sizes in (bf16, fp8, exact):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= most and (len(sizes) == 1 or sizes[-2] < most)


def test_large_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 64, 4096)
    while graphs.prepare_next(30, 600, 9):
        pass
    assert set(graphs._captured) == {(size, bound) for size in (16, 24, 32) for bound in (512, 1024)}


def test_a_model_that_cannot_be_captured_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 4, 512)

    def fail(self: DecodeGraphs, key: tuple[int, int]) -> None:
        raise RuntimeError("it waits")

    monkeypatch.setattr(DecodeGraphs, "_capture", fail)
    assert not graphs.prepare_next(4, 512)
    assert graphs.obstacle == "it waits"
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, key: pytest.fail("tried again"))
    assert not graphs.prepare_next(4, 512)


def test_large_steps_come_first_and_each_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, ran = make_graphs(monkeypatch, 4, 1024), list[Any]()
    monkeypatch.setattr(DecodeGraphs, "_run_once", lambda self, step: ran.append(step))
    while graphs.prepare_next(4, 1024):
        pass
    assert ran == [(4, 512), (2, 512), (1, 512), (4, 1024), (2, 1024), (1, 1024)]
    assert graphs.find(3, 700) == (4, 1024)
    assert len(ran) == 6  # a step that requests wait for runs when they need it


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_where_memory_ends_the_graphs_stay_that_are_there(
    kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, tried = make_graphs(monkeypatch, 8, 1024), list[Any]()

    def capture(self: DecodeGraphs, key: tuple[int, int]) -> Any:
        tried.append(key)
        if len(tried) > 3:
            raise kind("CUDA error: out of memory\nand where")
        return key

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    while graphs.prepare_next(8, 1024):
        pass
    (line,) = [record.getMessage() for record in caplog.records]
    assert "with 3 CUDA graphs" in line and "out of memory; lower gpu_memory_utilization" in line
    assert not graphs.missing(8, 1024)
    assert [graphs.find(rows, 9) for rows in (8, 4, 2, 1)] == [(8, 512), (4, 512), (2, 512), (2, 512)]
    assert len(tried) == 4 and len(caplog.records) == 1  # it is not tried again, and said once
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, key: key)
    graphs.clear()  # as for a sleep: there may be memory after it
    assert graphs.find(1, 9) == (1, 512)


def test_a_step_takes_a_larger_ones_graph_until_it_has_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 64, 4096)
    while graphs.prepare_next(64, 1024, sparse=True):
        pass
    assert [*graphs._captured] == [(n, 1024) for n in (64, 48, 32, 16, 4, 1)]  # of 64, 56, 48 and so on
    wanted = {2: (4, 1024), 7: (16, 1024), 8: (16, 1024), 50: (64, 1024), 64: (64, 1024)}
    assert {rows: graphs.find(rows, 100) for rows in wanted} == wanted
    assert graphs.find(64, 1025) == (64, 2048)  # no graph holds such lengths
    monkeypatch.setattr(graph_capture, "COVERED_STEPS", 3)
    assert [graphs.find(40, 100) for _ in range(5)] == [(48, 1024)] * 3 + [(40, 512)] * 2
    graphs._captured = {(64, 1024): graphs._captured[64, 1024]}
    assert graphs.find(31, 100) == (64, 1024)
    assert graphs.find(30, 100) == (64, 1024)
    assert graphs.find(24, 100) == (24, 512)  # 64 rows are more than twice as many


def test_a_step_that_cannot_be_captured_keeps_the_larger_ones_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 4, 512)
    assert graphs.find(4, 9) == (4, 512)
    monkeypatch.setattr(graph_capture, "COVERED_STEPS", 1)
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, key: _no_memory())
    assert [graphs.find(2, 9) for _ in range(3)] == [(4, 512)] * 3
    assert graphs.obstacle is not None


def _no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_captures_leave_memory_for_steps_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, free = make_graphs(monkeypatch, 8, 512), iter([2 << 30, 128 << 20, 127 << 20])
    monkeypatch.setattr(graph_capture, "_free_bytes", lambda model: next(free))
    while graphs.prepare_next(8, 512):
        pass
    assert [*graphs._captured] == [(8, 512), (4, 512)]
    assert "with 2 CUDA graphs" in caplog.text and "nearly out of memory: 127 MiB are free; lower" in caplog.text


def make_llm(exact: bool = False, **limits: Any) -> LLM:
    model = make_model("llama", "bf16", exact=exact, device=torch.device("cpu"))
    return LLM(model, max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=16, **limits)


def test_there_is_nothing_to_do_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    llm = make_llm()
    assert not llm.engine.prepare_next()
    llm.engine.warm_up()
    prepare(llm.engine)
    assert not caplog.records


class FakeGraphs:
    """Has three things to capture."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.sparse: list[bool] = []

    def prepare_next(self, most_rows: int, longest: int, least_rows: int, *, sparse: bool) -> bool:
        self.asked.append((most_rows, longest, least_rows))
        self.sparse.append(sparse)
        return len(self.asked) <= 3

    def missing(self, *_: int, sparse: bool) -> list[int]:
        return [0] * max(3 - len(self.asked), 0)


@pytest.mark.parametrize("warm_up", [None, True, False])
def test_an_engine_is_prepared_before_its_first_request(warm_up: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Engine] = []
    monkeypatch.setattr(Engine, "prepare", lambda engine: prepared.append(engine))
    llm = make_llm(**({} if warm_up is None else {"warm_up": warm_up}))
    assert prepared == ([] if warm_up is False else [llm.engine])


def test_where_it_fails_no_rank_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Engine] = []
    monkeypatch.setattr(Engine, "prepare", lambda engine: 1 // 0)
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    with pytest.raises(ZeroDivisionError):
        make_llm()
    assert len(closed) == 1


def test_its_progress_is_on_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    llm = make_llm()
    graphs: Any = FakeGraphs()
    llm.engine.model_runner.graphs = graphs
    monkeypatch.setattr(engine_module, "_PROGRESS_S", 0.0)
    prepare(llm.engine)
    assert graphs.asked == [(4, min(2048, llm.engine.max_model_len), 1)] * 4 and all(graphs.sparse)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "preparing kernels" and lines[-2] == "preparing 3 of 3 CUDA graphs"
    assert lines[-1].startswith("kernels and 3 of 3 CUDA graphs prepared in ")


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    graphs: Any = FakeGraphs()
    llm.engine.model_runner.graphs = graphs
    monkeypatch.setattr(engine_module, "_READY_S", 0.0)
    prepare(llm.engine)
    assert not graphs.asked


def test_without_graphs_kernels_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ran = make_llm(enforce_eager=True), list[WarmUpStep]()
    runner = llm.engine.model_runner
    assert runner.graphs is None and not runner.compiles
    monkeypatch.setattr(type(runner), "compiles", True)  # as on a GPU
    monkeypatch.setattr(WarmUpStep, "run", lambda step, *_: ran.append(step))
    prepare(llm.engine)
    assert {*plan_warm_up(4, 64), *plan_decodes(4)} == {*ran}
    assert {step.decoded_at > 1024 for step in ran if not step.num_prompt_tokens} == {True, False}


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_warm_up_step_without_memory_is_left_out(
    is_cut: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm, sizes = make_llm(), list[int]()
    planned = [*llm.engine.model_runner.warm_up_steps]

    def run(step: WarmUpStep, *_: Any) -> None:
        sizes.append(step.num_tokens)
        if step.num_tokens > 32:
            raise torch.OutOfMemoryError("CUDA out of memory\nand where")

    monkeypatch.setattr(WarmUpStep, "run", run)
    monkeypatch.setattr(type(llm.engine.model_runner), "compiles", True)
    if is_cut:  # the other ranks wait for this one
        llm.model.tensor_group = object()  # type: ignore[assignment]
        with pytest.raises(torch.OutOfMemoryError):
            prepare(llm.engine)
        return
    prepare(llm.engine)
    assert [size for size in sizes if size <= 32] == [s.num_tokens for s in planned[::-1] if s.num_tokens <= 32]
    *_, last = [size for size in sizes if size > 32]
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) < 4 and f"of {last} tokens and more: CUDA out of memory; lower" in lines[-1]


@pytest.mark.parametrize("exact", [False, True])
def test_the_warm_up_steps_then_the_graphs(exact: bool) -> None:
    llm = make_llm(exact)
    graphs: Any = FakeGraphs()
    llm.engine.model_runner.graphs = graphs
    before = [layer.k.clone() for layer in llm.engine.model_runner.layers]
    llm.engine.warm_up(2, 100)
    assert graphs.asked == [(2, 100, 1)] * 4 and not any(graphs.sparse)
    assert not llm.engine.model_runner.warm_up_steps
    for layer, held in zip(llm.engine.model_runner.layers, before, strict=True):
        assert torch.equal(layer.k, held)  # a warm-up step writes nothing
    llm.engine.warm_up(1000, 10**9, least_seqs=9)
    assert graphs.asked[4:] == [(4, llm.engine.max_model_len, 4)]
    layers = [*llm.engine.model_runner.layers]
    llm.engine.model_runner.layers.clear()  # as while it sleeps
    assert not llm.engine.prepare_next()
    llm.engine.model_runner.layers.extend(layers)


def test_warm_up_steps_pass_through_all_kinds_of_sizes() -> None:
    steps = plan_warm_up(num_seqs=64, max_tokens=8192)
    totals = [step.num_decodes + step.num_prompt_tokens for step in steps]
    assert max(totals) == 8192
    for low, high in ((1, 33), (33, 512), (512, 2048), (2048, 8193)):
        some = [total for total in totals if low <= total < high]
        assert {total % 16 == 0 for total in some} == {True, False}
    assert {step.num_decodes for step in steps} == {0, 5, 15}
    assert all(step.num_prompt_tokens > 1 for step in steps)
    late = [step for step in steps if step.decoded_at > 1024]  # in several splits, beside few tokens and many
    assert [(step.num_decodes, step.num_prompt_tokens) for step in late] == [(15, 5), (15, 8177)]
    assert any(step.num_prompt_tokens <= 8 and step.num_decodes == 0 for step in steps)
    few = plan_warm_up(num_seqs=2, max_tokens=20)
    assert {step.num_decodes for step in few} == {0, 1}
    assert max(step.num_decodes + step.num_prompt_tokens for step in few) == 20


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("step", [0, -1, plan_decodes(3)[-1]], ids=str)
def test_a_warm_up_step_changes_no_token(step: Any, exact: bool) -> None:
    prompts = random_prompts(3, seed=1)
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, logprobs=0)
    cold, warm = make_llm(exact), make_llm(exact)
    expected = [cold.generate([prompt], params)[0].outputs for prompt in prompts]
    runner = warm.engine.model_runner
    found = []
    for prompt in prompts:  # one between the others
        with torch.no_grad():
            chosen = step if isinstance(step, WarmUpStep) else runner.warm_up_steps[step]
            chosen.run(runner.model, runner.layers, runner.slots, 30)
        found.append(warm.generate([prompt], params)[0].outputs)
    assert found == expected


def test_an_idle_server_goes_on_after_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ready = make_llm(), threading.Event()
    monkeypatch.setattr(llm.engine, "prepare_next", lambda: ready.set() or False)
    loop = EngineLoop(lambda: llm.engine, lambda events: None, max_num_waiting=4)
    loop.start()
    assert ready.wait(10)
    loop.drain()
    assert loop.join(60)


def test_an_idle_server_without_one_gets_ready_after_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ready, calls = make_llm(warm_up=False), threading.Event(), []

    def prepare_next() -> bool:
        calls.append(llm.engine.has_unfinished)
        if len(calls) > 2:
            ready.set()
        return len(calls) <= 2

    loop = EngineLoop(lambda: llm.engine, lambda events: None, max_num_waiting=4)
    loop.start()
    monkeypatch.setattr(llm.engine, "prepare_next", prepare_next)
    loop.run(lambda engine: None).result(10)
    assert not calls
    (prompt,) = random_prompts(1, seed=0)

    loop.submit([RequestInput(prompt, SamplingParams(max_tokens=2, ignore_eos=True))])
    assert ready.wait(60)
    loop.run(lambda engine: None).result(10)  # and it still listens
    loop.drain()
    assert loop.join(60)
    assert calls and not any(calls)
    assert llm.stats.num_steps >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gptj"])
def test_warm_on_a_gpu_it_says_the_same(family: str, enforce_eager: bool) -> None:
    sizes = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64}
    model = make_model(family, "blockwise", exact=True, device=torch.device("cuda"), **sizes)
    prompts, params = random_prompts(6, seed=3), SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    found = []
    for is_warm in (False, True):
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "num_kv_pages": 40}
        llm = LLM(model, enforce_eager=enforce_eager, **limits)  # type: ignore[arg-type]
        if is_warm:
            prepare(llm.engine)
            llm.engine.warm_up()
            assert not llm.engine.prepare_next()
        found.append([output.outputs for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
