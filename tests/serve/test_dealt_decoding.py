"""Decoding where each rank of a cut head draws for a share of the rows: the tokens and logprobs of one process."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from octavo import LLM, SamplingParams
from octavo.distributed import tensor_group
from octavo.distributed.tensor_group import TensorGroup
from octavo.models import Decoder
from octavo.parallel import parallelize
from octavo.serve.engine import graph_capture
from octavo.serve.engine.graph_capture import CapturedSteps, operand_addresses
from tests.parallel.test_tensor_parallel import ids, make
from tests.ranks import run_group
from tests.serve.eager_graphs import EagerGraphs

NUM_SEQS, MAX_LEN = 6, 128
CASES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "logprobs": {"logprobs": 0},
    "best": {"logprobs": 3, "top_k": 20, "top_p": 0.9},
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "penalties": {"presence_penalty": 0.7, "logprobs": 1},
}


def sampled(model: Decoder, case: dict[str, Any]) -> tuple[list[Any], int]:
    """Every request's tokens and logprobs, and how many steps were dealt; lengths differ, so that rows become free."""
    llm = LLM(model, max_num_seqs=NUM_SEQS, max_model_len=MAX_LEN)
    runner = llm.engine.model_runner
    graphs = runner.graphs = EagerGraphs(runner, [8], MAX_LEN)  # NUM_SEQS rows and two for padding
    params = [
        SamplingParams(**{"temperature": 0.7 + 0.2 * i, "seed": i, "ignore_eos": True, "max_tokens": 4 + 3 * i, **case})
        for i in range(NUM_SEQS)
    ]
    outputs = llm.generate([ids(i, 5 + i).tolist() for i in range(NUM_SEQS)], params)
    answers = [output.outputs[0] for output in outputs]
    return [(answer.token_ids, answer.logprobs) for answer in answers], graphs.num_dealt


def job(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    one, cut = (make("llama", "rowwise", exact=True) for _ in range(2))
    parallelize(cut, TensorGroup.of(), mode="gather")
    for name, case in CASES.items():
        wanted, num_dealt = sampled(one, case)
        assert num_dealt == 0
        with mock.patch.object(tensor_group, "MIN_DEALT_BYTES", 0):
            answers, num_dealt = sampled(cut, case)
        found[name] = repr(answers) == repr(wanted), num_dealt
    found["captures"] = captures(cut, rank)
    with mock.patch.object(graph_capture, "LEAST_FREE_BYTES", 1 << 30 if rank else 1 << 40):  # a CPU has as much free
        found["least free"] = graph_capture._free_bytes(cut)
    found["moved"] = moved(cut, rank)
    return found


class Failing(CapturedSteps[int, str]):
    """Steps of which one rank cannot capture number 2."""

    what = "steps go on"

    def __init__(self, model: Decoder, rank: int) -> None:
        self.model, self.rank, self.obstacle, self._captured = model, rank, None, {0: "there"}

    def _capture(self, key: int) -> str:
        if (self.rank, key) == (1, 2):
            raise RuntimeError("out of memory\nand more")
        return f"step {key}"

    def _cover(self, key: int) -> None: ...

    def _run_once(self, step: str) -> None: ...


def captures(model: Decoder, rank: int) -> list[str | None]:
    steps = Failing(model, rank)
    return [steps._get(1), steps._get(2), steps.obstacle, steps._get(3), steps._get(1)]


def moved(model: Decoder, rank: int) -> list[bool]:
    """Whether graphs are left after new weights: in place, on other places of one rank, and on those of all."""
    runner, left = LLM(model, num_kv_pages=2).engine.model_runner, []
    for ranks in ((), (1,), (0, 1)):
        steps: Any = Failing(model, rank)
        steps.addresses, steps._recorder = operand_addresses(model), SimpleNamespace(clear=lambda: None)
        runner.graphs = steps
        if rank in ranks:
            steps.addresses[-1] += 1
        runner.note_new_weights()
        left.append(not steps.is_empty)
    return left


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_group(job, 2)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_dealt_have_the_tokens_of_one_process(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        is_equal, num_dealt = rank[case]
        assert is_equal and num_dealt > 8


def test_a_capture_that_fails_on_one_rank_is_used_by_none(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["captures"] == ["step 1", None, "out of memory", None, "step 1"]


def test_the_rank_with_the_least_memory_decides_for_all(found: list[dict[str, Any]]) -> None:
    assert [rank["least free"] for rank in found] == [1 << 30] * 2


def test_graphs_are_dropped_on_all_ranks_where_weights_moved_on_one(found: list[dict[str, Any]]) -> None:
    assert [rank["moved"] for rank in found] == [[True, False, False]] * 2
