"""Penalties, biases and forbidden tokens: by hand on small rows, in bits as row by row, whatever the host knows."""

import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.serve.engine.logit_adjustment import FEWEST, LogitsProcessor
from octavo.serve.engine.sequence import Sequence
from tests.serve.random_models import make_model
from tests.serve.row_by_row import adjust_row_by_row

INF = float("inf")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class EveryThird:
    """Of a grammar, as much as is asked: tokens allowed by the last one; none known to be forbidden behind token 5."""

    error = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.last = vocab_size, 0

    def allowed_tokens(self) -> bytes | None:
        bits = sum(1 << i for i in range(self.vocab_size) if i % 3 == self.last % 3)
        # a mask may end early: what is behind it is not allowed
        return None if self.last == 5 else bits.to_bytes(-(-self.vocab_size // 8), "little")[: 4 + self.last]

    def accept(self, token_id: int) -> None:
        self.last = token_id


def sequence(output: list[int], prompt: list[int] | None = None, **params: object) -> Sequence:
    """A sequence with the prompt 1, 2 and an output, in its pages."""
    given = SamplingParams(**params)  # type: ignore[arg-type]
    prompt = prompt or [1, 2]
    tokens, ends = [*prompt, *output], frozenset({0, 7, 99})
    return Sequence(0, tokens, len(prompt), given, seed=0, max_len=100, stop_token_ids=ends, page_table=[0])


def adjust(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """All rows at once, as a step does; the same tensor where there is nothing to do."""
    adjustments = LogitsProcessor(len(sequences), logits.shape[1], logits.device)
    adjustments.place(sequences, list(range(len(sequences))))
    plan = adjustments.plan(sequences)
    return logits if plan is None else adjustments.apply(logits, plan)


def adjusted(output: list[int], **params: object) -> list[float]:
    logits = torch.tensor([[0.0, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, 3.0]])
    result: list[float] = adjust(logits, [sequence(output, **params)])[0].tolist()
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def random_params(rng: random.Random, vocab_size: int) -> dict[str, object]:
    """Some of what changes logits, often together."""
    bias = {rng.randrange(vocab_size): rng.uniform(-9, 9) for _ in range(rng.randrange(1, 30))}
    kinds: dict[str, object] = {
        "presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2), "logit_bias": bias, "min_tokens": rng.randrange(30),
    }  # fmt: skip
    return {name: value for name, value in kinds.items() if rng.random() < 0.4}


def random_sequences(count: int, vocab_size: int, seed: int) -> list[Sequence]:
    rng = random.Random(seed)
    sequences = []
    for _ in range(count):
        tokens = [[rng.randrange(vocab_size) for _ in range(rng.randrange(low, 40))] for low in (1, 0)]
        sequences.append(sequence(tokens[1], tokens[0], **random_params(rng, vocab_size)))
        if rng.random() < 0.2:
            sequences[-1].grammar = EveryThird(vocab_size)  # type: ignore[assignment]
    return sequences


def random_logits(rows: int, vocab_size: int, device: str, seed: int = 0) -> torch.Tensor:
    """Infinite ones, zeros of both signs and NaN among them."""
    logits = 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    for i, value in enumerate((0.0, -0.0, INF, -INF, float("nan"))):
        logits.view(-1)[i::29] = value
    return logits.to(device)


def test_nothing_asked_is_nothing_done() -> None:
    logits = torch.randn(3, 8)
    assert adjust(logits, [sequence([3]), sequence([3], min_tokens=1), sequence([])]) is logits


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"presence_penalty": 0.5}, [0.0, 2.0, -2.0, 0.5, 4.0, -4.5, 0.5, 3.0]),
        ({"frequency_penalty": 0.5}, [0.0, 2.0, -2.0, 0.0, 4.0, -4.5, 0.5, 3.0]),
        ({"frequency_penalty": -1, "presence_penalty": 1}, [0.0, 2.0, -2.0, 2.0, 4.0, -4.0, 0.5, 3.0]),
        ({"repetition_penalty": 2}, [0.0, 1.0, -4.0, 0.5, 4.0, -8.0, 0.5, 3.0]),
        ({"logit_bias": {0: 1.5, 7: -100}}, [1.5, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, -97.0]),
        ({"min_tokens": 4}, [-INF, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, -INF]),
        ({"min_tokens": 3}, [0.0, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, 3.0]),
        ({"logit_bias": {3: 1}, "repetition_penalty": 2, "presence_penalty": 1}, [0, 1, -4, 0, 4, -9, 0.5, 3]),
    ],
    ids=str,
)
def test_by_hand(params: dict[str, object], expected: list[float]) -> None:
    assert adjusted([3, 3, 5], **params) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [96, 101, 1003])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_all_rows_at_once_have_the_bits_of_row_by_row(rows: int, vocab_size: int, device: str) -> None:
    for seed in range(3 if rows > 1 else 12):
        sequences = random_sequences(rows, vocab_size, seed)
        logits = random_logits(rows, vocab_size, device, seed)
        assert same_bits(adjust(logits, sequences), adjust_row_by_row(logits, sequences))


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_counted_before_the_host_knows_them(device: str) -> None:
    """Over steps in which sequences come, start over, move to another slot, pause and end, tokens one step behind."""
    rng, vocab_size, num_slots = random.Random(3), 53, 8
    adjustments = LogitsProcessor(num_slots, vocab_size, torch.device(device))
    running: dict[Sequence, int] = {}
    pending: list[tuple[Sequence, int]] = []
    num_checked = num_moved = 0
    for step in range(300):
        free = sorted(set(range(num_slots)) - set(running.values()))
        if free and rng.random() < 0.2:
            running[random_sequences(1, vocab_size, seed=step)[0]] = rng.choice(free)
        rows = [seq for seq in running if rng.random() < 0.8]
        adjustments.place(rows, [running[seq] for seq in rows])
        rows = [seq for seq in rows if seq.grammar is None]  # a grammar needs the tokens
        plan = adjustments.plan(rows)
        logits = random_logits(len(rows), vocab_size, device, step)
        drawn = torch.tensor([rng.randrange(vocab_size) for _ in rows], device=device)
        got = logits if plan is None else adjustments.apply(logits, plan)
        if plan is not None:
            adjustments.count(drawn, plan)
        for seq in rows:
            seq.num_pending += 1
        for seq, token in pending:  # the step before is read now
            seq.num_pending -= 1
            seq.token_ids.append(token)
        pending = list(zip(rows, drawn.tolist(), strict=True))
        assert same_bits(got, adjust_row_by_row(logits, rows)), step
        num_checked += len(rows)
        for seq in [seq for seq in running if not seq.num_pending and rng.random() < 0.2]:
            # preempted: once pages are gone another may have its slot; it comes back with all its tokens known
            slot = running.pop(seq)
            seq.page_table = []
            adjustments.release()
            if rng.random() < 0.7:
                seq.page_table = [0]
                running[seq] = rng.choice(sorted(set(range(num_slots)) - set(running.values())))
                num_moved += running[seq] != slot
    assert num_checked > 500 and num_moved > 5


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_there_only_while_it_is_needed(device: str) -> None:
    adjustments = LogitsProcessor(4, 1003, torch.device(device))
    plain, biased = sequence([3]), sequence([3], logit_bias={5: 1})
    penalized = sequence([3], prompt=list(range(60)), repetition_penalty=1.5)
    adjustments.place([plain], [0])
    assert adjustments.num_bytes == 0
    adjustments.place([plain, biased], [0, 1])
    least = adjustments.num_bytes
    assert least > 0
    adjustments.place([plain, biased, penalized], [0, 1, 2])
    for token in range(500, 500 + FEWEST):
        plan = adjustments.plan([biased, penalized])
        assert plan is not None
        adjustments.count(torch.tensor([1, token], device=device), plan)
        penalized.token_ids.append(token)
    assert adjustments.num_bytes > least
    logits = random_logits(2, 1003, device)
    plan = adjustments.plan([biased, penalized])
    assert plan is not None
    assert same_bits(adjustments.apply(logits, plan), adjust_row_by_row(logits, [biased, penalized]))
    penalized.page_table = []
    adjustments.place([plain, biased], [0, 1])
    assert adjustments.num_bytes > 0
    biased.page_table = []
    adjustments.release()
    assert adjustments.num_bytes == 0


class CountedOps(TorchDispatchMode):
    """Which operators ran that make no mere view, and how often each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[str(func)] += not func.is_view
        return func(*args, **(kwargs or {}))


def test_one_row_takes_as_many_launches_as_64() -> None:
    counts = []
    for rows in (1, 64):
        sequences = [sequence([3, 4], repetition_penalty=1.5, logit_bias={4: 1}, min_tokens=9) for _ in range(rows)]
        for seq in sequences:
            seq.grammar = EveryThird(101)  # type: ignore[assignment]
        adjustments = LogitsProcessor(rows, 101, torch.device("cpu"))
        logits = torch.zeros(rows, 101)
        adjustments.place(sequences, list(range(rows)))
        plan = adjustments.plan(sequences)
        assert plan is not None
        with CountedOps() as ops:
            adjustments.apply(logits, plan)
            adjustments.count(logits[:, 0].long(), plan)
        counts.append(ops.counts)
    assert counts[0] == counts[1]
    assert 0 < counts[0].total() < 80


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    sequences = random_sequences(64, 1003, seed=1)
    logits = random_logits(64, 1003, "cuda")
    drawn = torch.arange(64, device="cuda")
    adjustments = LogitsProcessor(64, 1003, logits.device)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        adjustments.place(sequences, list(range(64)))
        plan = adjustments.plan(sequences)
        assert plan is not None
        adjustments.apply(logits, plan)
        adjustments.count(drawn, plan)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_logprobs_are_the_models_whatever_was_allowed() -> None:
    llm = LLM(make_model("llama", "rowwise", num_layers=1), num_kv_pages=12)
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3}
    free = llm.generate([[1, 2, 3]], SamplingParams(**params))[0].outputs[0]  # type: ignore[arg-type]
    first = free.token_ids[0]
    bent = llm.generate([[1, 2, 3]], SamplingParams(logit_bias={first: -50}, **params))[0].outputs[0]  # type: ignore[arg-type]
    assert bent.token_ids[0] != first
    assert free.logprobs is not None and bent.logprobs is not None
    assert bent.logprobs[0][first] == free.logprobs[0][first]  # still the best one
    assert bent.logprobs[0][bent.token_ids[0]].rank == 2


def test_prompt_logprobs_survive_chunks_preemption_and_the_prefix_cache() -> None:
    model = make_model("llama", "rowwise", num_layers=1)
    prompts = [[1 + (7 * i + j) % 90 for j in range(100)] for i in range(3)]
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, prompt_logprobs=2, seed=1)
    calm = LLM(model, num_kv_pages=24)
    expected = [output.prompt_logprobs for output in calm.generate(prompts, params)]
    assert [output.prompt_logprobs for output in calm.generate(prompts, params)] == expected
    tight = LLM(model, num_kv_pages=6, max_num_batched_tokens=40, max_num_seqs=3, plan_known_lengths=False)
    assert [output.prompt_logprobs for output in tight.generate(prompts, params)] == expected
    assert tight.stats.num_preemptions > 0
    assert tight.stats.num_multi_chunk_prompts > 0
    for prompt, entries in zip(prompts, expected, strict=True):
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        assert all(entry is not None and token in entry for token, entry in zip(prompt[1:], entries[1:], strict=True))


def test_what_only_an_engine_can_refuse() -> None:
    llm = LLM(make_model("llama", "rowwise", num_layers=1), num_kv_pages=4)
    with pytest.raises(RequestError, match="logit_bias names token 96"):
        llm.generate([[1]], SamplingParams(logit_bias={96: 1}))
    with pytest.raises(RequestError, match="json_schema needs a tokenizer"):
        llm.generate([[1]], SamplingParams(json_schema={}))
