"""What a step would have to wait for is got ready before: on request, or while nothing runs."""

import threading
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.numerics import Numerics, get_recipe
from octavo.ops.gemm.scaled_mm import unpadded_rows
from octavo.ops.gemm.skinny_mm import MAX_TOKENS
from octavo.serve.engine.decode_graphs import DecodeGraphs, batch_sizes
from octavo.serve.engine.loop import EngineLoop
from octavo.serve.engine.prompt_warm_up import plan_warm_up
from octavo.serve.engine.request import RequestInput
from tests.serve.random_models import make_model, random_prompts


def make_graphs(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_model_len: int) -> DecodeGraphs:
    """Graphs that nobody captures: their keys stand for them."""
    graphs = object.__new__(DecodeGraphs)
    graphs.batch_sizes = batch_sizes(max_num_seqs, Numerics())
    graphs.max_model_len, graphs._captured, graphs.obstacle = max_model_len, {}, None
    graphs.model = make_model("llama", "bf16", device=torch.device("cpu"))
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, key: key)
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


def make_llm(exact: bool = False) -> LLM:
    model = make_model("llama", "bf16", exact=exact, device=torch.device("cpu"))
    return LLM(model, max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=16)


def test_there_is_nothing_to_do_on_a_cpu() -> None:
    llm = make_llm()
    assert not llm.engine.prepare_next()
    llm.engine.warm_up()


class FakeGraphs:
    """Has three things to capture."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def prepare_next(self, most_rows: int, longest: int, least_rows: int) -> bool:
        self.asked.append((most_rows, longest, least_rows))
        return len(self.asked) <= 3


@pytest.mark.parametrize("exact", [False, True])
def test_the_warm_up_steps_then_the_graphs(exact: bool) -> None:
    llm = make_llm(exact)
    graphs: Any = FakeGraphs()
    llm.engine.model_runner.graphs = graphs
    before = [layer.k.clone() for layer in llm.engine.model_runner.layers]
    llm.engine.warm_up(2, 100)
    assert graphs.asked == [(2, 100, 1)] * 4
    assert not llm.engine.model_runner._warm_up_steps
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
    few = plan_warm_up(num_seqs=2, max_tokens=20)
    assert {step.num_decodes for step in few} == {0, 1}
    assert max(step.num_decodes + step.num_prompt_tokens for step in few) == 20


@pytest.mark.parametrize("exact", [False, True])
def test_a_warm_up_step_changes_no_token(exact: bool) -> None:
    prompts = random_prompts(3, seed=1)
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, logprobs=0)
    cold, warm = make_llm(exact), make_llm(exact)
    expected = [cold.generate([prompt], params)[0].outputs for prompt in prompts]
    runner = warm.engine.model_runner
    found = []
    for prompt in prompts:  # one between the others
        with torch.no_grad():
            runner._warm_up_steps[0].run(runner.model, runner.layers, runner.slots, 30)
        found.append(warm.generate([prompt], params)[0].outputs)
    assert found == expected


def test_an_idle_server_gets_ready_after_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ready, calls = make_llm(), threading.Event(), []

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
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gptj"])
def test_warm_on_a_gpu_it_says_the_same(family: str) -> None:
    sizes = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64}
    model = make_model(family, "blockwise", exact=True, device=torch.device("cuda"), **sizes)
    prompts, params = random_prompts(6, seed=3), SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    found = []
    for is_warm in (False, True):
        llm = LLM(model, max_num_seqs=8, max_num_batched_tokens=128, num_kv_pages=40)
        if is_warm:
            llm.engine.warm_up()
            assert not llm.engine.prepare_next()
        found.append([output.outputs for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
