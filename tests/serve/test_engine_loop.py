"""EngineLoop: requests from many threads, each sequence ends once, nothing that a drain has admitted is lost."""

import threading
from collections import Counter
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.serve.engine import Engine
from octavo.serve.engine.loop import EngineLoop
from octavo.serve.engine.request import (
    BusyError,
    Delta,
    FailedError,
    LostRankError,
    Phase,
    RequestInput,
    RequestState,
    UnavailableError,
)
from tests.serve.random_models import make_model

WAIT_S = 30.0


def build() -> Engine:
    return LLM(make_model("llama", "rowwise", num_layers=1), max_num_seqs=4, num_kv_pages=12).engine


class Book:
    """Keeps every delta; a condition can be waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[RequestState, Delta]] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[tuple[RequestState, Delta]]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_for_tokens(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(bool(e.token_ids) for _, e in self.events) >= count, WAIT_S)

    def ends(self) -> Counter[tuple[RequestState, int]]:
        """How often each sequence has ended."""
        return Counter((t, e.index) for t, e in self.events if e.finish_reason is not None)


def make_input(max_tokens: int = 5, n: int = 1) -> RequestInput:
    return RequestInput([1, 2, 3], SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, seed=1))


def started(book: Book, max_num_waiting: int = 100) -> EngineLoop:
    loop = EngineLoop(build, book, max_num_waiting=max_num_waiting)
    loop.start()
    loop_is_up(loop)
    return loop


def loop_is_up(loop: EngineLoop) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if loop.phase is not Phase.STARTING:
            return
        pause.wait(0.01)
    raise AssertionError("the engine was not built in time")


def test_takes_nothing_before_it_is_built_and_after_its_end() -> None:
    loop = EngineLoop(build, Book(), max_num_waiting=1)
    for call in (
        lambda: loop.submit([make_input()]),
        lambda: loop.run(Engine.reset_prefix_cache),
        loop.sleep,
        loop.wake,
    ):
        with pytest.raises(UnavailableError, match="starting"):
            call()
    loop.start()
    loop_is_up(loop)
    loop.drain()
    assert loop.join(WAIT_S)
    assert loop.phase is Phase.STOPPED
    for call in (lambda: loop.submit([make_input()]), lambda: loop.run(Engine.reset_prefix_cache), loop.sleep):
        with pytest.raises(UnavailableError, match="stopped"):
            call()


def test_a_rank_that_is_lost_at_an_order_ends_the_engine() -> None:
    def lose(_: Engine) -> None:
        raise LostRankError("rank 1 was killed by signal 9")

    loop = started(Book())
    with pytest.raises(LostRankError, match="killed by signal 9"):
        loop.run(lose).result(WAIT_S)
    assert loop.join(WAIT_S) and loop.phase is Phase.FAILED


def test_given_up_from_another_thread_while_idle() -> None:
    loop = started(Book())
    loop.give_up(LostRankError("rank 1 was killed"))
    assert loop.join(WAIT_S) and loop.phase is Phase.FAILED and str(loop.error) == "rank 1 was killed"
    for call in (lambda: loop.submit([make_input()]), lambda: loop.run(Engine.reset_prefix_cache), loop.sleep):
        with pytest.raises(FailedError, match=r"has failed and takes no requests .*: rank 1 was killed"):
            call()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_given_up_from_another_thread_within_a_step(is_stuck: bool) -> None:
    """Every sequence ends once: with the step, or at once where that does not end; its tokens come too late."""
    book = Book()
    loop = started(book)
    entered, go_on = threading.Event(), threading.Event()
    step = loop.engine.step

    def held() -> Any:
        entered.set()
        assert go_on.wait(WAIT_S)
        return step()

    loop.engine.step = held  # type: ignore[method-assign]
    requests = loop.submit([make_input(n=2)])
    assert entered.wait(WAIT_S)
    requests += loop.submit([make_input()])  # is not admitted yet
    order = loop.run(Engine.reset_prefix_cache)
    error = LostRankError("rank 1 was killed")
    loop.give_up(error)
    assert loop.phase is Phase.FAILED and not book.ends()
    if is_stuck:
        loop.give_up(error, is_stuck=True)
        assert sum(book.ends().values()) == 3 and loop.num_open == 0
        with pytest.raises(FailedError):
            order.result(0)
    go_on.set()
    assert loop.join(WAIT_S)
    assert book.ends() == Counter({(requests[0], 0): 1, (requests[0], 1): 1, (requests[1], 0): 1})
    assert {delta.finish_reason for _, delta in book.events} == {"error"}
    assert loop.num_ended["error"] == 3 and loop.num_open == 0 and loop.error is error


def test_all_requests_or_none() -> None:
    book = Book()
    loop = started(book, max_num_waiting=2)
    with pytest.raises(RequestError, match="at least one token"):
        loop.engine.make_input([], SamplingParams())
    with pytest.raises(RequestError, match="6 sequences at most"):
        loop.submit([make_input(n=3), make_input(n=4)])
    assert loop.num_open == loop.num_admitted == 0
    held = threading.Event()
    loop.run(lambda engine: held.wait(WAIT_S) and None)
    loop.submit([make_input(n=3)])
    with pytest.raises(BusyError, match="room for 6"):
        loop.submit([make_input(n=2), make_input(n=2)])
    loop.submit([make_input(n=3)])
    held.set()
    loop.drain()
    assert loop.join(WAIT_S)
    assert loop.num_ended == {"stop": 0, "length": 6, "abort": 0, "error": 0}


def test_a_drain_among_submitting_threads_loses_nothing() -> None:
    book = Book()
    loop = started(book)
    admitted: list[RequestState] = []
    refused = threading.Event()

    def keep_submitting() -> None:
        while True:
            try:
                admitted.extend(loop.submit([make_input(max_tokens=2, n=2)]))
            except BusyError:
                continue
            except UnavailableError:
                refused.set()
                return

    threads = [threading.Thread(target=keep_submitting) for _ in range(4)]
    for thread in threads:
        thread.start()
    book.wait_for_tokens(40)
    loop.drain()
    for thread in threads:
        thread.join(WAIT_S)
    assert refused.is_set()
    assert loop.join(WAIT_S)
    assert book.ends() == Counter({(request, index): 1 for request in admitted for index in range(2)})
    assert loop.num_ended["length"] == 2 * len(admitted) == 2 * loop.num_admitted
    assert (loop.num_open, loop.engine.stats.num_kv_pages_used) == (0, 0)
    loop.engine.check_integrity()


def test_a_drain_between_two_looks_at_the_phase_ends_the_thread() -> None:
    loop = EngineLoop(build, lambda deltas: None, max_num_waiting=1)
    take, drained = loop._take_messages, []

    def take_after_drain() -> None:
        if not drained and loop.phase is Phase.SERVING:
            drained.append(True)
            loop.drain()  # the thread has read that it serves, and takes the drain's message
        take()

    loop._take_messages = take_after_drain  # type: ignore[method-assign]
    loop.start()
    assert loop.join(30.0) and loop.phase is Phase.STOPPED


def test_aborts_at_any_time_end_each_sequence_once() -> None:
    book = Book()
    loop = started(book)
    requests = loop.submit([make_input(max_tokens=60, n=2) for _ in range(6)])  # more than run at a time
    loop.abort(requests[5:])
    book.wait_for_tokens(10)
    loop.abort(requests[:3])
    loop.abort(requests[:2])
    loop.drain()
    assert loop.join(WAIT_S)
    assert set(book.ends().values()) == {1}
    reasons = Counter(e.finish_reason for _, e in book.events if e.finish_reason)
    assert reasons == {"abort": 8, "length": 4}
    assert loop.engine.stats.num_kv_pages_used == 0
    lengths = Counter(t for t, e in book.events if bool(e.token_ids))
    assert [lengths[request] for request in requests[3:5]] == [120, 120]


def test_woken_before_it_slept() -> None:
    book = Book()
    loop = started(book)
    loop.submit([make_input(max_tokens=100)])
    book.wait_for_tokens(1)
    slept = loop.sleep()
    loop.wake().result(WAIT_S)
    with pytest.raises(UnavailableError, match="woken before it slept"):
        slept.result(WAIT_S)
    assert loop.phase is Phase.SERVING
    loop.submit([make_input()])
    loop.drain()
    assert loop.join(WAIT_S)
    assert loop.num_ended["length"] == 2
