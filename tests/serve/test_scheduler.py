"""Scheduler: the token budget, chunks, admission, preemption, progress of everyone."""

import random

import pytest

from octavo.serve.engine.page_manager import PageManager
from octavo.serve.engine.scheduler import Chunk, Scheduler
from octavo.serve.engine.sequence import Sequence
from octavo.serve.engine.stats import EngineStats
from octavo.serve.sampling_params import SamplingParams

PAGE = 4


def make(
    num_pages: int,
    max_num_seqs: int = 8,
    budget: int = 16,
    caching: bool = False,
    mixed: int | None = None,
) -> Scheduler:
    stats, pages = EngineStats(num_kv_pages=num_pages), PageManager(num_pages, PAGE, "", caching)
    return Scheduler(pages, max_num_seqs, budget, stats, max_num_mixed_tokens=mixed)


def make_seq(prompt_len: int, max_tokens: int = 100, first: int = 0) -> Sequence:
    tokens = list(range(first, first + prompt_len))
    return Sequence(0, tokens, prompt_len, SamplingParams(), seed=0, max_len=prompt_len + max_tokens)


def advance(scheduler: Scheduler, chunks: list[Chunk], token: int = 7) -> None:
    """What the engine does after a step."""
    for chunk in chunks:
        if chunk.is_last:
            chunk.sequence.append(token, None, weight_version=0)
            if chunk.sequence.is_finished:
                scheduler.finish(chunk.sequence)


def spans(chunks: list[Chunk]) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.end, chunk.is_last) for chunk in chunks]


def test_prompts_are_chunked_by_the_budget_and_mixed_with_decode() -> None:
    scheduler = make(num_pages=32, budget=10)
    short, long = make_seq(4), make_seq(20, first=100)
    scheduler.add(short)
    scheduler.add(long)
    chunks = scheduler.schedule()
    assert spans(chunks) == [(0, 4, True), (0, 6, False)]
    advance(scheduler, chunks)
    chunks = scheduler.schedule()
    assert spans(chunks) == [(4, 5, True), (6, 15, False)]  # decode first, the chunk takes the rest
    advance(scheduler, chunks)
    chunks = scheduler.schedule()
    assert spans(chunks) == [(5, 6, True), (15, 20, True)]
    advance(scheduler, chunks)
    assert spans(scheduler.schedule()) == [(6, 7, True), (20, 21, True)]
    assert scheduler.stats.num_prefill_chunks == 4
    assert scheduler.stats.num_multi_chunk_prompts == 1


def test_a_step_that_decodes_beside_prompts_is_short() -> None:
    scheduler = make(num_pages=64, budget=32, mixed=8)
    scheduler.add(make_seq(3))
    scheduler.add(make_seq(30, first=100))
    chunks = scheduler.schedule()
    assert spans(chunks) == [(0, 3, True), (0, 29, False)]  # none decodes yet
    advance(scheduler, chunks)
    scheduler.add(make_seq(8, first=200))
    chunks = scheduler.schedule()
    assert spans(chunks) == [(3, 4, True), (29, 30, True), (0, 6, False)]  # one token is no prompt
    advance(scheduler, chunks)
    scheduler.add(make_seq(9, first=300))
    chunks = scheduler.schedule()
    assert spans(chunks)[2:] == [(6, 8, True), (0, 4, False)]
    advance(scheduler, chunks)
    assert spans(scheduler.schedule())[3:] == [(4, 9, True)]


def test_prompts_get_a_quarter_of_a_short_step_that_is_full() -> None:
    scheduler = make(num_pages=64, budget=32, mixed=8)
    for first in range(0, 70, 10):
        scheduler.add(make_seq(1, first=first))
    advance(scheduler, scheduler.schedule())
    scheduler.add(make_seq(6, first=100))
    assert spans(scheduler.schedule())[7:] == [(0, 2, False)]


def test_more_prompt_tokens_join_where_more_wait() -> None:
    scheduler = make(num_pages=64, budget=16, mixed=4)
    answers = [make_seq(2, first=first) for first in (0, 10)]
    for seq in answers:
        scheduler.add(seq)
    advance(scheduler, scheduler.schedule())
    for first in (100, 200, 300):
        scheduler.add(make_seq(12, first=first))
    chunks = scheduler.schedule()
    assert spans(chunks) == [(2, 3, True), (2, 3, True), (0, 9, False)]  # a quarter of 36
    advance(scheduler, chunks)
    for first in (400, 500, 600, 700):
        scheduler.add(make_seq(12, first=first))
    sizes = [chunk.num_tokens for chunk in scheduler.schedule()]
    assert (sizes[:2], sum(sizes)) == ([1, 1], 16)  # never more than a step's tokens


def test_a_prompt_that_has_no_tokens_left_in_a_step_holds_up_no_answer_behind_it() -> None:
    scheduler = make(num_pages=64, budget=16, mixed=4)
    first, long, last = make_seq(2), make_seq(40, first=100), make_seq(2, first=200)
    for seq in (first, last):
        scheduler.add(seq)
    advance(scheduler, scheduler.schedule())
    scheduler.add(long)
    advance(scheduler, scheduler.schedule())
    scheduler.running.sort(key=[first, long, last].index)
    scheduler.add(make_seq(4, first=300))
    assert [c.sequence for c in scheduler.schedule()] == [first, long, last]


def test_max_num_seqs_bounds_the_running() -> None:
    scheduler = make(num_pages=32, max_num_seqs=2, budget=100)
    for first in (0, 100, 200):
        scheduler.add(make_seq(3, max_tokens=1, first=first))
    chunks = scheduler.schedule()
    assert [c.sequence.token_ids[0] for c in chunks] == [0, 100]
    advance(scheduler, chunks)
    assert [c.sequence.token_ids[0] for c in scheduler.schedule()] == [200]


def test_waiting_are_admitted_in_order_and_none_overtakes() -> None:
    scheduler = make(num_pages=4, budget=100)
    for seq in (make_seq(8), make_seq(12, first=100), make_seq(1, first=200)):
        scheduler.add(seq)
    assert [c.sequence.prompt_len for c in scheduler.schedule()] == [8]


def test_the_tail_is_preempted_and_starts_over_first() -> None:
    scheduler = make(num_pages=4, budget=100)
    old, young, queued = make_seq(8), make_seq(8, first=100), make_seq(1, first=200)
    for seq in (old, young, queued):
        scheduler.add(seq)
    advance(scheduler, scheduler.schedule())
    chunks = scheduler.schedule()  # both need a third page
    assert [c.sequence for c in chunks] == [old]
    assert scheduler.stats.num_preemptions == 1
    assert list(scheduler.waiting) == [young, queued]
    assert young.num_computed_tokens == 0
    assert young.page_table == []
    assert young.num_tokens == 9  # keeps what it sampled
    old.max_len = old.num_tokens + 1
    advance(scheduler, chunks)
    chunks = scheduler.schedule()
    assert chunks[0].sequence is young
    assert spans(chunks[:1]) == [(0, 9, True)]
    assert scheduler.stats.num_recomputed_tokens == 8


def test_a_sequence_alone_may_use_the_whole_cache() -> None:
    scheduler = make(num_pages=2, budget=100)
    seq = make_seq(5, max_tokens=3)
    scheduler.add(seq)
    while scheduler.has_unfinished:
        advance(scheduler, scheduler.schedule())
    assert seq.num_tokens == 8
    assert seq.finish_reason == "length"
    assert scheduler.stats.num_preemptions == 0


def test_samples_of_a_prompt_share_its_pages_within_one_step() -> None:
    scheduler = make(num_pages=32, budget=100, caching=True)
    samples = [make_seq(10) for _ in range(3)]
    for seq in samples:
        scheduler.add(seq)
    assert spans(scheduler.schedule()) == [(0, 10, True), (8, 10, True), (8, 10, True)]
    assert len({tuple(seq.page_table[:2]) for seq in samples}) == 1
    assert scheduler.stats.num_prefix_hit_tokens == 16
    scheduler.page_manager.check_integrity(samples)


def test_samples_share_only_what_this_step_reaches() -> None:
    scheduler = make(num_pages=32, budget=6, caching=True)
    for _ in range(2):
        scheduler.add(make_seq(10))
    assert spans(scheduler.schedule()) == [(0, 6, False)]
    chunks = scheduler.schedule()
    assert spans(chunks) == [(6, 10, True), (8, 10, True)]


def test_an_aborted_sequence_leaves_no_page_behind() -> None:
    scheduler = make(num_pages=8, max_num_seqs=1, budget=4)
    running, waiting = make_seq(6), make_seq(6)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    scheduler.finish(waiting)
    scheduler.finish(running)
    assert not scheduler.has_unfinished
    assert scheduler.stats.num_kv_pages_used == 0
    scheduler.page_manager.check_integrity([])


@pytest.mark.parametrize("seed", range(9))
def test_random_loads_finish_within_the_limits(seed: int) -> None:
    rng = random.Random(seed)
    num_pages, max_num_seqs, budget = rng.choice([(6, 4, 5), (12, 8, 9), (20, 5, 64)])
    mixed = None if seed < 3 else 2
    scheduler = make(num_pages, max_num_seqs, budget, caching=seed % 2 == 0, mixed=mixed)
    pending = []
    for _ in range(40):
        prompt_len = rng.randrange(1, num_pages * PAGE - 1)
        room = num_pages * PAGE - prompt_len
        pending.append(make_seq(prompt_len, rng.randrange(1, room + 1), first=rng.choice([0, 0, 500])))
    everyone = list(pending)
    num_steps = 0
    while pending or scheduler.has_unfinished:
        while pending and rng.random() < 0.5:
            scheduler.add(pending.pop())
        if not scheduler.has_unfinished:
            continue
        chunks = scheduler.schedule()
        num_steps += 1
        assert 0 < sum(chunk.num_tokens for chunk in chunks) <= budget
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        assert len(scheduler.running) <= max_num_seqs
        for chunk in chunks:
            assert 0 <= chunk.start < chunk.end == chunk.sequence.num_computed_tokens <= chunk.sequence.num_tokens
            assert len(chunk.sequence.page_table) * PAGE >= chunk.end
        scheduler.page_manager.check_integrity([*scheduler.running, *scheduler.waiting])
        advance(scheduler, chunks, token=rng.randrange(3))
    assert all(seq.num_tokens == seq.max_len for seq in everyone)
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.num_multi_chunk_prompts > 0 or budget == 64
    assert scheduler.page_manager.num_used_pages == 0
