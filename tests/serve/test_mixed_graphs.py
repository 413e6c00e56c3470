"""Steps with prompts as one graph: which are, what is sent for them, and that they change no bit in exact mode."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.distributed.tensor_group import TensorGroup
from octavo.ops.attention import PAGE_SIZE
from octavo.ops.attention.mixed import SPLIT
from octavo.parallel import parallelize
from octavo.serve.engine import graph_capture
from octavo.serve.engine.mixed_graphs import MOST_LENGTH, MOST_TOKENS, MixedGraphs, Planned, mixed_sizes
from octavo.serve.engine.mixed_inputs import MixedInputs, MixedShape, Work, empty_vector, fill_vector
from octavo.serve.engine.prompt_graphs import PromptGraphs
from octavo.serve.engine.scheduler import Chunk
from tests.parallel.test_tensor_parallel import ids, make
from tests.ranks import run_group
from tests.serve.eager_graphs import EagerGraphs, EagerMixedGraphs
from tests.serve.random_models import make_model, random_prompts

CPU = torch.device("cpu")


def make_chunk(start: int, end: int, first_id: int = 0, *, has_pending: bool = False) -> Any:
    """Tokens [start, end) of a sequence whose token at a place is first_id and the place."""
    num_known = end - has_pending
    sequence: Any = SimpleNamespace(token_ids=list(range(first_id, first_id + num_known)))
    return Chunk(sequence, start, end, is_last=True, has_pending=has_pending)


def test_a_vector_holds_a_step() -> None:
    shape = MixedShape(16, 5, 8, 6, num_slots=9)
    chunks = [make_chunk(4, 5, 100), make_chunk(1499, 1500, has_pending=True)]
    chunks += [make_chunk(2, 6, 40), make_chunk(0, 3, 70)]
    work = Work.of([1, 1, 4, 3], [5, 1500, 6, 3], 2, 4)
    inputs = MixedInputs.of(fill_vector(shape, chunks, [3, 0, 8, 5], work, pinned=False), shape)
    assert all(x.dtype == torch.int32 for x in inputs)
    assert inputs.token_ids.tolist() == [104, -1, 42, 43, 44, 45, 70, 71, 72, *[0] * 7]
    assert inputs.positions.tolist() == [4, 1499, 2, 3, 4, 5, 0, 1, 2, *[0] * 7]
    assert inputs.sequences.tolist() == [0, 1, 2, 2, 2, 2, 3, 3, 3, *[-1] * 7]
    assert inputs.slots.tolist() == [3, 0, 8, 5, 9]
    assert inputs.seq_lens.tolist() == [5, 1500, 6, 3, 0]
    assert inputs.cu_seqlens.tolist() == [0, 1, 2, 6, 9, 9]
    assert inputs.splits.tolist() == [[0, 0], [1, 0], [1, 1], *[[-1, -1]] * 5]
    assert inputs.tiles.tolist() == [[2, 0], [2, 4], [3, 0], [3, 4], *[[-1, -1]] * 2]


def test_a_prompt_s_last_token_may_be_pending() -> None:
    chunks = [make_chunk(2, 5, 10, has_pending=True)]
    shape = MixedShape(4, 1, 1, 4, num_slots=3)
    inputs = MixedInputs.of(fill_vector(shape, chunks, [2], Work.of([3], [5], 1, 4), pinned=False), shape)
    assert inputs.token_ids.tolist() == [12, 13, -3, 0]


def test_padding_alone_has_no_work() -> None:
    shape = MixedShape(4, 2, 3, 5, num_slots=7)
    inputs = MixedInputs.of(empty_vector(shape, pinned=False), shape)
    assert (inputs.sequences == -1).all() and (inputs.splits == -1).all() and (inputs.tiles == -1).all()
    assert (inputs.slots == 7).all() and not inputs.seq_lens.any() and not inputs.cu_seqlens.any()


@pytest.mark.parametrize("group", [1, 4, 7, 16, 17, 32])
def test_every_row_and_key_is_in_one_list(group: int) -> None:
    lengths, ends = [1, 1, 1, 5, 64, 130, 2], [1, 1024, 1025, 70, 64, 4000, 3]
    work = Work.of(lengths, ends, group, 64)
    singles = 3 if group <= 16 else 0
    assert [*Counter(work.splits[:, 0].tolist()).items()] == [(i, -(-ends[i] // SPLIT)) for i in range(singles)]
    for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        if i < singles:
            assert sorted(work.splits[work.splits[:, 0] == i, 1]) == [*range(-(-end // SPLIT))]
        rows = sorted(work.tiles[work.tiles[:, 0] == i, 1])
        assert rows == ([] if i < singles else [*range(0, length * group, 64)])
    assert np.all(np.diff(work.splits[:, 0]) >= 0)  # those of a sequence stand together


def make_graphs(monkeypatch: pytest.MonkeyPatch, max_tokens: int = 2048, max_len: int = MOST_LENGTH) -> MixedGraphs:
    """Graphs that are not captured: their keys stand for them."""
    model = make_model("llama", "bf16", device=CPU)
    slots, layer = SimpleNamespace(num_slots=300), SimpleNamespace(k=torch.zeros(1))
    runner: Any = SimpleNamespace(model=model, slots=slots, layers=[layer], choices=None)
    graphs = EagerMixedGraphs(runner, max_tokens, max_len, (16, 64))
    monkeypatch.setattr(EagerMixedGraphs, "_capture", lambda self, key: key)
    monkeypatch.setattr(EagerMixedGraphs, "_run_once", lambda self, step: None)
    monkeypatch.setattr(EagerMixedGraphs, "_replay", lambda self, step, *given: step)
    return graphs


def run(graphs: MixedGraphs, *spans: tuple[int, int]) -> Any:
    """The graph that takes a step; "pieces" where it is left to others."""
    chunks = [make_chunk(*span) for span in spans]
    planned = graphs.plan(chunks)
    return "pieces" if planned is None else graphs.run(planned, chunks, [*range(len(chunks))])


def test_sizes_end_where_pieces_do_as_well() -> None:
    model = make_model("llama", "bf16", device=CPU)
    assert mixed_sizes(model, 8192) == [*range(64, 513, 64), *range(640, 1025, 128)]
    assert mixed_sizes(model, 8192)[-1] == MOST_TOKENS
    assert mixed_sizes(model, 100) == [64, 128]


def test_which_steps_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch)
    decode = (1499, 1500)  # two splits
    assert [run(graphs, decode, (0, n)) for n in (60, 60, 63, 64, 60)] == [None, (64, 16), (64, 16), None, (64, 16)]
    assert [run(graphs, *[decode] * 9, (0, 40)) for _ in range(2)] == [None, (64, 64)]
    assert run(graphs, *[decode] * 33, (0, 20)) == "pieces"  # 66 splits
    assert run(graphs, *[decode] * 32, (0, 20)) == (64, 64)
    assert run(graphs, (0, 1025)) == "pieces"
    assert [run(graphs, (MOST_LENGTH - 9, MOST_LENGTH)) for _ in range(2)] == [(64, 16)] * 2
    assert run(graphs, (MOST_LENGTH - 9, MOST_LENGTH + 1)) == "pieces"
    assert run(graphs, (MOST_LENGTH, MOST_LENGTH + 1), (0, 9)) == "pieces"


def test_tiles_that_do_not_fit_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch)
    graphs._group, graphs._known_rows = 1, 64
    assert [run(graphs, *[(0, 2)] * 66) for _ in range(2)] == [None, (192, 16)]
    assert [run(graphs, *[(0, 2)] * 68) for _ in range(2)] == [None, (256, 16)]  # a tile each; 192 have 3 + 64 places
    assert run(graphs, *[(0, 2)] * 81) == "pieces"  # 1024 have 16 + 64


def test_preparing_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, 300)
    while graphs.prepare_next():
        pass
    assert [*graphs._captured] == [(size, num) for size in (320, 256, 192, 128, 64) for num in (64, 16)]
    assert [run(graphs, (0, n)) for n in (2, 65, 300)] == [(64, 16), (128, 16), (320, 16)]


def test_a_size_between_takes_the_next_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch)
    while graphs.prepare_next(sparse=True):
        pass
    sizes = [1024, 768, 512, 384, 256, 128]
    assert [*graphs._captured] == [(size, num) for size in sizes for num in (64, 16)]
    assert [run(graphs, (0, n)) for n in (50, 130, 513, 700)] == [(128, 16), (256, 16), (768, 16), (768, 16)]
    monkeypatch.setattr(graph_capture, "COVERED_STEPS", 2)
    assert [run(graphs, (0, 300)) for _ in range(4)] == [(384, 16)] * 2 + [(320, 16)] * 2
    del graphs._captured[768, 16], graphs._captured[256, 16]
    assert run(graphs, (0, 700)) == (768, 64)  # more splits hold it, too
    assert run(graphs, (0, 500)) == (512, 16)


def test_what_cannot_be_captured_is_left_to_pieces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = make_graphs(monkeypatch)
    assert [run(graphs, (0, 60)) for _ in range(2)] == [None, (64, 16)]
    assert graphs.most_tokens == 1024

    def fail(self: Any, key: Any) -> None:
        raise RuntimeError("it waits")

    monkeypatch.setattr(EagerMixedGraphs, "_capture", fail)
    assert not graphs.prepare_next()
    assert caplog.messages[-1].endswith("and steps of other sizes are computed as longer prompts are: it waits")
    assert graphs.obstacle == "it waits" and graphs.most_tokens == 0 and not graphs.missing()
    assert run(graphs, (0, 60)) == (64, 16)  # what is there stays
    assert run(graphs, (0, 600)) == "pieces"


def test_pieces_are_captured_for_larger_steps_alone() -> None:
    graphs = object.__new__(PromptGraphs)
    graphs.sizes, graphs.obstacle, graphs._captured = [512, 1024, 1152, 1280], None, {}
    assert graphs.missing(1024) == [1280, 1152] and graphs.missing(1024, sparse=True) == [1280]
    assert graphs.missing() == [1280, 1152, 1024, 512]


def make_llm(family: str = "qwen3", **options: Any) -> LLM:
    numerics = {key: options.pop(key) for key in ("kv_cache_dtype", "attention_dtype") if key in options}
    model = make_model(family, device=CPU, **numerics)
    return LLM(model, max_num_seqs=4, max_num_batched_tokens=64, num_kv_pages=24, **options)


PARAMS = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, logprobs=0, seed=3)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("gptj", {"kv_cache_dtype": "bf16"}),
        ("qwen3", {"attention_dtype": "fp8"}),
        ("qwen3_moe", {"enable_return_routed_experts": True}),
    ],
    ids=["fp8", "bf16", "fp8 attention", "moe"],
)
def test_a_replay_changes_no_bit_in_exact_mode(family: str, options: dict[str, Any]) -> None:
    prompts = random_prompts(6, seed=3)  # in chunks, beside sequences that decode
    found: list[Any] = []
    for is_whole in (False, True):
        llm = make_llm(family, **options)
        runner = llm.engine.model_runner
        if is_whole:
            graphs = EagerMixedGraphs(runner, 64, 512, (2, 8))
            runner.mixed_graphs, runner.graphs = graphs, EagerGraphs(runner, [1, 2, 4], 512)
            runner.graphs.choices = runner.choices
        outputs = llm.generate(prompts, PARAMS)
        found.append([sample for output in outputs for sample in output.outputs])
        if is_whole:
            assert graphs.num_replayed > 4
    for eager, whole in zip(*found, strict=True):
        assert eager.token_ids == whole.token_ids and eager.logprobs == whole.logprobs
        if "enable_return_routed_experts" in options:
            assert np.array_equal(eager.routed_experts, whole.routed_experts)


def cut_job(rank: int, world: int) -> tuple[str, str, int]:
    """What one process samples without graphs, two ranks with them, and how many steps these replayed."""
    one, cut = (make("llama", "rowwise", exact=True) for _ in range(2))
    parallelize(cut, TensorGroup.of(), mode="gather")
    found, graphs = list[str](), None
    for model in (one, cut):
        llm = LLM(model, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128)
        if model is cut:
            graphs = llm.engine.model_runner.mixed_graphs = EagerMixedGraphs(llm.engine.model_runner, 32, 128)
        outputs = llm.generate([ids(i, 20 + 9 * i).tolist() for i in range(6)], PARAMS)
        found.append(repr([(x.outputs[0].token_ids, x.outputs[0].logprobs) for x in outputs]))
    assert graphs is not None
    return found[0], found[1], graphs.num_replayed


def test_ranks_that_share_a_model() -> None:
    for wanted, found, num_replayed in run_group(cut_job, 2):
        assert wanted == found and num_replayed > 4


def test_graphs_are_captured_again_after_sleep() -> None:
    prompts, found = random_prompts(6, seed=3), list[Any]()
    llm = make_llm()
    runner = llm.engine.model_runner
    runner.mixed_graphs = graphs = EagerMixedGraphs(runner, 64, 512, (2, 8))
    for _ in range(2):
        before = graphs.num_replayed
        found.append([output.outputs for output in llm.generate(prompts, PARAMS)])
        assert graphs.num_replayed > before
        llm.engine.sleep()
        assert graphs.is_empty  # which hold addresses of the cache that is gone
        llm.engine.wake()
    assert found[0] == found[1]


def test_a_token_that_only_the_device_knows() -> None:
    runner = make_llm().engine.model_runner
    graphs = EagerMixedGraphs(runner, 64, 512)
    runner.slots.last_token[:] = torch.tensor([7, 8, 77, 9, 5])
    shape, found = graphs._shape((64, 8)), list[torch.Tensor]()
    for last, has_pending in ((77, True), (77, False), (8, False)):
        chunk = make_chunk(0, 4, 10, has_pending=has_pending)
        if not has_pending:
            chunk.sequence.token_ids[-1] = last
        vector = fill_vector(shape, [chunk], [2], Work.of([4], [4], 2, 64), pinned=False)
        with torch.no_grad():
            found.append(graphs._forward(vector, shape)[3])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_step_with_longer_sequences_goes_another_way() -> None:
    llm = make_llm()
    runner = llm.engine.model_runner
    graphs = runner.mixed_graphs = EagerMixedGraphs(runner, 64, PAGE_SIZE)
    planned: list[bool] = []
    plan = graphs.plan
    graphs.plan = lambda chunks: planned.append((found := plan(chunks)) is not None) or found  # type: ignore[method-assign]
    prompts = [[5] * 100, [6] * 30]
    wanted = make_llm().generate(prompts, PARAMS)
    assert [x.outputs for x in llm.generate(prompts, PARAMS)] == [x.outputs for x in wanted]
    assert {True, False} == {*planned}


@pytest.mark.parametrize("is_held", [True, False])
def test_pieces_take_what_no_graph_holds(is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    runner, asked = llm.engine.model_runner, list[str]()
    key = Planned((64, 8), 9, Work(np.zeros((0, 2)), np.zeros((0, 2)))) if is_held else None

    class Mixed:
        is_empty = True

        def plan(self, chunks: Any) -> Any:
            return key

        def run(self, *given: Any) -> None:
            asked.append("whole")

    class Pieces:
        is_empty = True

        def run(self, *given: Any) -> None:
            asked.append("pieces")

    runner.mixed_graphs, runner.prompt_graphs = Mixed(), Pieces()  # type: ignore[assignment]
    llm.generate([[5] * 9], SamplingParams(max_tokens=1))
    assert asked == ["whole" if is_held else "pieces"]


def test_graphs_of_whole_steps_are_captured_before_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, asked = make_llm(), list[Any]()
    runner = llm.engine.model_runner
    monkeypatch.setattr(type(runner), "compiles", True)  # as on a GPU
    runner.warm_up_steps.clear()

    class Mixed:
        most_tokens, num_missing, max_len = 64, 2, MOST_LENGTH

        def missing(self, *, sparse: bool) -> list[int]:
            return [0] * self.num_missing

        def prepare_next(self, *, sparse: bool) -> bool:
            asked.append("whole")
            self.num_missing -= 1
            return self.num_missing >= 0

    class Pieces:
        def missing(self, above: int, *, sparse: bool) -> list[int]:
            return [above] * 3

        def prepare_next(self, above: int, *, sparse: bool) -> bool:
            asked.append(above)
            return False

    runner.mixed_graphs, runner.prompt_graphs = Mixed(), Pieces()  # type: ignore[assignment]
    assert runner.num_missing_graphs(4, 100, sparse=True) == 5
    while llm.engine.prepare_next():
        pass
    assert asked == ["whole", "whole", "whole", 64]
    runner._longest = MOST_LENGTH + 1  # of such sequences small steps go in pieces, which a start does not wait for
    assert not llm.engine.prepare_next() and not llm.engine.prepare_next(sparse=True)
    assert asked[4:] == ["whole", 0, "whole", 64]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "kinds"),
    [("qwen3", ("fp8", "bf16")), ("qwen3_moe", ("fp8", "bf16")), ("gptj", ("bf16", "bf16")), ("qwen3", ("fp8", "fp8"))],
)
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("exact", [True, False])
def test_on_a_gpu(
    family: str, kinds: tuple[str, str], is_warm: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit in exact mode; else nearly the same logprobs of the tokens that both chose."""
    sizes: dict[str, object] = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64}
    sizes["max_position_embeddings"] = 4096
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = 192  # no multiple of a block
    cuda = torch.device("cuda")
    model = make_model(family, "blockwise", kinds[0], exact, device=cuda, attention_dtype=kinds[1], **sizes)
    prompts = [prompt * 4 for prompt in random_prompts(12, seed=3)]  # in chunks, beside sequences that decode
    prompts += [prompt * 6 for prompt in prompts[:2]]  # whose keys are in several splits
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, seed=7)  # the second answers are the first ones
    replayed: list[int] = []
    replay = MixedGraphs._replay

    def count(self: MixedGraphs, step: Any, planned: Planned, *given: Any) -> torch.Tensor:
        replayed.append(planned.num_tokens)
        return replay(self, step, planned, *given)

    monkeypatch.setattr(MixedGraphs, "_replay", count)
    found = []
    for enforce_eager in (True, False):
        llm = LLM(model, max_num_seqs=8, max_num_batched_tokens=128, num_kv_pages=200, enforce_eager=enforce_eager)
        if is_warm:
            llm.engine.warm_up()
        found.append([output.outputs[0] for output in llm.generate(prompts, params)])
        assert bool(replayed) != enforce_eager
    if exact:
        assert found[0] == found[1]
        llm.engine.sleep()
        llm.engine.wake()
        assert [output.outputs[0] for output in llm.generate(prompts, params)] == found[0]
        return
    for eager, whole in zip(*found, strict=True):
        both = zip(eager.token_ids, whole.token_ids, eager.logprobs or [], whole.logprobs or [], strict=True)
        for token, other, given, other_given in both:
            if token != other:
                break  # a near tie; from here on they are two texts
            # as far as FP8 codes of attention's output may round to the other side, and codes after them
            assert abs(given[token].logprob - other_given[token].logprob) < 0.5
    same = sum(a.token_ids[0] == b.token_ids[0] for a, b in zip(*found, strict=True))
    assert same >= len(prompts) - 2
