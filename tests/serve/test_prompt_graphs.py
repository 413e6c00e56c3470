"""Steps with prompts by pieces of CUDA graphs: when they are captured, and that they change no bit."""

from collections import Counter
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.numerics import Numerics, QuantizedTensor, Scaling, get_recipe
from octavo.ops.gemm.scaled_mm import unpadded_rows
from octavo.serve.engine import graph_capture, prompt_graphs
from octavo.serve.engine.paged_context import PagedContext
from octavo.serve.engine.prompt_graphs import PromptGraphs, Stop, sizes_for, step_sizes
from tests.serve.random_models import make_model, random_prompts


@pytest.mark.parametrize("exact", [False, True])
def test_sizes_hold_every_step_and_need_no_padding(exact: bool) -> None:
    numerics = Numerics(get_recipe("blockwise"), exact=exact)
    for most in (1, 64, 65, 700, 2048, 8192):
        sizes = step_sizes(most, numerics)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= min(most, 2048)
        assert len(sizes) == 1 or sizes[-2] < most
        assert all(unpadded_rows(size, exact) == size for size in sizes)


def test_gpus_that_share_a_step_have_sizes_for_larger_and_full_ones() -> None:
    numerics = Numerics(get_recipe("blockwise"))
    assert step_sizes(8192, numerics, 2)[-6:] == [2048, 2560, 3072, 3584, 4096, 8192]
    assert step_sizes(3000, numerics, 2)[-2:] == [2560, 3072]
    assert step_sizes(8192, numerics, 4)[-1] == 8192


def test_experts_have_a_size_for_full_steps() -> None:
    numerics = Numerics(get_recipe("blockwise"))
    assert step_sizes(8192, numerics, has_experts=True) == [*step_sizes(8192, numerics), 8192]
    assert step_sizes(1000, numerics, has_experts=True) == step_sizes(1000, numerics)
    cpu = torch.device("cpu")
    largest = [sizes_for(make_model(family, "bf16", device=cpu), 8192)[-1] for family in ("llama", "qwen3_moe")]
    assert largest == [2048, 8192]


def test_what_would_be_mostly_padding_is_not_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 8192)
    graphs.sizes = step_sizes(8192, graphs.model.numerics, 2)
    found = [graphs.run(torch.zeros(n, dtype=torch.int64), object()) for n in (8192, 8100, 7000, 7000)]  # type: ignore[arg-type]
    assert found == [None, 8192, None, None]


def make_graphs(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> PromptGraphs:
    """Pieces that nobody captures: their sizes stand for them."""
    graphs = object.__new__(PromptGraphs)
    graphs.sizes, graphs.obstacle = step_sizes(max_tokens, Numerics()), None
    graphs._captured, graphs._seen, graphs._num_covered = {}, set(), Counter()
    graphs.model = make_model("llama", "bf16", device=torch.device("cpu"))
    monkeypatch.setattr(PromptGraphs, "_capture", lambda self, size: size)
    monkeypatch.setattr(PromptGraphs, "_run_once", lambda self, step: None)
    monkeypatch.setattr(PromptGraphs, "_replay", lambda self, step, token_ids, context: step)
    return graphs


def test_a_size_is_captured_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, context = make_graphs(monkeypatch, 300), object()
    found: list[Any] = [graphs.run(torch.zeros(n, dtype=torch.int64), context) for n in (10, 60, 65, 64, 128, 300, 999)]  # type: ignore[arg-type]
    assert found == [None, 64, None, 64, 128, None, None]


def test_preparing_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 300)
    while graphs.prepare_next():
        pass
    found: list[Any] = [graphs.run(torch.zeros(n, dtype=torch.int64), object()) for n in (1, 65, 300)]  # type: ignore[arg-type]
    assert found == [64, 128, 320]
    assert not graphs.is_empty


def test_a_size_between_takes_the_next_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 2048)
    while graphs.prepare_next(sparse=True):
        pass
    assert [*graphs._captured] == [2048, 1792, 1536, 1280, 1024, 768, 512, 384, 256, 128]
    found: list[Any] = [graphs.run(torch.zeros(n, dtype=torch.int64), object()) for n in (50, 130, 513, 700)]  # type: ignore[arg-type]
    assert found == [128, 256, 768, 768]  # 64, 192 and 640 are not there
    monkeypatch.setattr(graph_capture, "COVERED_STEPS", 2)
    found = [graphs.run(torch.zeros(1100, dtype=torch.int64), object()) for _ in range(4)]  # type: ignore[arg-type]
    assert found == [1280, 1280, 1152, 1152]
    del graphs._captured[256]
    assert graphs.run(torch.zeros(130, dtype=torch.int64), object()) is None  # type: ignore[arg-type] # 384 is too large


def test_what_cannot_be_captured_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 300)

    def fail(self: PromptGraphs, size: int) -> None:
        raise RuntimeError("it waits")

    monkeypatch.setattr(PromptGraphs, "_capture", fail)
    assert not graphs.prepare_next()
    assert graphs.obstacle == "it waits"
    monkeypatch.setattr(PromptGraphs, "_capture", lambda self, size: pytest.fail("tried again"))
    assert all(graphs.run(torch.zeros(9, dtype=torch.int64), object()) is None for _ in range(3))  # type: ignore[arg-type]


class FakeRecorder:
    """Counts pieces."""

    num_ended = 0

    def end(self) -> int:
        self.num_ended += 1
        return self.num_ended

    def begin(self) -> None:
        pass


@pytest.mark.parametrize("family", ["qwen3", "gptj"])
def test_every_attention_ends_a_piece(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, "bf16", device=torch.device("cpu"))
    llm = LLM(model, max_num_seqs=2, max_num_batched_tokens=64, num_kv_pages=4)
    monkeypatch.setattr(prompt_graphs, "borrow", lambda x: x)
    layers = llm.engine.model_runner.layers
    before = [layer.k.clone() for layer in layers]
    inputs = torch.zeros(3, 8, dtype=torch.int64)
    inputs[2].fill_(-1)
    heads = model.config.num_heads, model.config.head_dim
    recorder: Any = FakeRecorder()
    places = prompt_graphs.AttendedPlaces(16, model)
    between = prompt_graphs._Between(inputs, layers, places, recorder)
    with torch.no_grad():
        hidden = model(inputs[0], between)
    for stop in between.stops:
        assert isinstance(stop.out, torch.Tensor) and stop.out.data_ptr() == places.rows(8).data_ptr()
    assert hidden.shape == (8, model.config.hidden_size)
    assert between.pieces == list(range(1, model.config.num_layers + 1))
    assert [stop.layer_index for stop in between.stops] == list(range(model.config.num_layers))
    assert all(stop.queries.shape == (8, *heads) for stop in between.stops)
    assert {stop.softmax_scale for stop in between.stops} == {model.config.head_dim**-0.5}
    for layer, held in zip(layers, before, strict=True):
        assert torch.equal(layer.k, held)  # nobody's tokens are not cached


@pytest.mark.parametrize("exact", [False, True])
def test_attentions_leave_codes_where_the_kernel_does(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", "blockwise", exact=exact, device=torch.device("cpu"))
    layers = LLM(model, max_num_seqs=2, max_num_batched_tokens=64, num_kv_pages=4).engine.model_runner.layers
    monkeypatch.setattr(prompt_graphs, "borrow", lambda x: x)
    monkeypatch.setattr(prompt_graphs, "stores_codes", lambda q, scaling: scaling == Scaling.block_1x128())
    inputs = torch.full((3, 8), -1)
    inputs[:2] = 0
    recorder: Any = FakeRecorder()
    places = prompt_graphs.AttendedPlaces(16, model)
    between = prompt_graphs._Between(inputs, layers, places, recorder)
    with torch.no_grad():
        assert model(inputs[0], between).isfinite().all()
    width = model.config.num_heads * model.config.head_dim
    for stop in between.stops:
        if exact:
            assert isinstance(stop.out, torch.Tensor)
            continue
        assert isinstance(stop.out, QuantizedTensor) and stop.out.shape == (8, width)
        assert stop.out.scale.stride() == (1, 8)
        assert stop.out is places.codes(8, Scaling.block_1x128())
    small, large = (places.codes(num, Scaling.block_1x128()) for num in (4, 16))
    assert small.qdata.data_ptr() == large.qdata.data_ptr() and small.scale.stride() == (1, 4)


def test_a_replay_hands_each_attention_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Piece:
        def __init__(self, name: str) -> None:
            self.name = name

        def replay(self) -> None:
            calls.append(self.name)

    class Context:
        positions, slot_mapping = torch.arange(3), torch.tensor([7, 8, 9])

        def attend_into(self, out: torch.Tensor, layer: int, q: torch.Tensor, *, softmax_scale: float) -> None:
            calls.append((layer, q.shape, softmax_scale))
            out.copy_(q + 1)

    graphs, attended = object.__new__(PromptGraphs), torch.zeros(4, 1, 2)
    inputs = torch.full((3, 4), 5)
    stops = [Stop(i, torch.full((4, 1, 2), float(i)), 0.5, attended) for i in range(2)]
    pieces: Any = [Piece(name) for name in "abc"]
    context: Any = Context()
    step = prompt_graphs.StepPieces(inputs, pieces, stops, torch.arange(8.0).view(4, 2))
    hidden = graphs._replay(step, torch.tensor([1, 2, 3]), context)
    assert calls == ["a", (0, (3, 1, 2), 0.5), "b", (1, (3, 1, 2), 0.5), "c"]
    assert torch.equal(hidden, torch.arange(6.0).view(3, 2))
    assert inputs.tolist() == [[1, 2, 3, 5], [0, 1, 2, 5], [7, 8, 9, -1]]
    assert torch.equal(attended, torch.tensor([2.0, 2.0, 2.0, 0.0]).view(4, 1, 1).expand(4, 1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gptj"])
@pytest.mark.parametrize(("exact", "is_warm"), [(True, False), (True, True), (False, True)])
def test_pieces_change_no_bit_on_a_gpu(
    family: str, exact: bool, is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact; else what they are filled up to may take another GEMM, and attention leaves them codes."""
    sizes = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64 if exact else 128}
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = 192  # no multiple of a block
    model = make_model(family, "blockwise", exact=exact, device=torch.device("cuda"), **sizes)
    prompts = [prompt * 4 for prompt in random_prompts(12, seed=3)]  # in chunks, beside sequences that decode
    params = SamplingParams(temperature=float(exact), max_tokens=8, ignore_eos=True, logprobs=0)
    replayed: list[int] = []
    replay = PromptGraphs._replay

    def count(self: PromptGraphs, step: Any, token_ids: torch.Tensor, context: PagedContext) -> torch.Tensor:
        replayed.append(token_ids.shape[0])
        return replay(self, step, token_ids, context)

    monkeypatch.setattr(PromptGraphs, "_replay", count)
    found = []
    for enforce_eager in (True, False):
        llm = LLM(model, max_num_seqs=8, max_num_batched_tokens=128, num_kv_pages=80, enforce_eager=enforce_eager)
        llm.engine.model_runner.mixed_graphs = None  # which would take these steps
        if is_warm:
            llm.engine.warm_up()
        found.append([output.outputs for output in llm.generate(prompts, params)])
        assert bool(replayed) != enforce_eager
    if exact:
        assert found[0] == found[1]
        return
    alone, together = ([token for outputs in each for out in outputs for token in out.token_ids] for each in found)
    agreeing = sum(a == b for a, b in zip(alone, together, strict=True))
    assert agreeing >= 0.75 * len(alone), (agreeing, alone, together)  # rows in wrong places would leave 1 in 100
