"""Which replica a prompt goes to: by its prefix, by load, and within bounded memory."""

import json

import pytest

from octavo.serve.router import balance as module
from octavo.serve.router.balance import CHUNK_BYTES, MARGIN, MAX_CHUNKS, RATIO, Balance, chunks_of, weight_of


def body(prompt: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", **fields, "prompt": prompt}).encode()


def test_equal_beginnings_have_equal_chunks() -> None:
    story = "once upon a time " * 60
    one, other = chunks_of(body(story + "a", seed=1)), chunks_of(body(story + "b" * 300, temperature=0.5))
    num_shared = len(story) // CHUNK_BYTES
    assert one[:num_shared] == other[:num_shared] and len(set(one)) == len(one) >= num_shared
    assert other[num_shared + 1 :] and not set(other[num_shared + 1 :]) & set(one)
    ids = list(range(1000, 1300))
    assert chunks_of(body([*ids, 1]))[:5] == chunks_of(body([*ids, 2]))[:5]


def test_a_conversation_shares_its_beginning_with_the_next_turn() -> None:
    turns = [{"role": "user", "content": "tell me more " * 40}]
    first = json.dumps({"messages": turns}).encode()
    longer = json.dumps({"messages": [*turns, {"role": "assistant", "content": "yes"}]}).encode()
    assert chunks_of(first)[:-1] == chunks_of(longer)[: len(chunks_of(first)) - 1] != []


def test_short_and_long_bodies() -> None:
    assert chunks_of(b"") == chunks_of(body("short")) == chunks_of(b'{"other": "' + b"a" * 5000) == []
    assert len(chunks_of(body("a" * 10**6))) == MAX_CHUNKS


def test_a_prompt_goes_where_its_prefix_is_and_others_to_the_least_loaded() -> None:
    balance = Balance(3)
    story, poem = chunks_of(body("s" * 2000)), chunks_of(body("p" * 2000))
    idle = {0: 0.0, 1: 0.0, 2: 0.0}
    home = balance.choose(story, idle)
    others = [index for index in idle if index != home]
    assert balance.choose(poem, idle | {home: 1.0}) in others
    assert balance.choose(story, idle | {home: MARGIN}) == home
    assert balance.choose([], {0: 3.0, 1: 1.0, 2: 2.0}) == 1


def test_the_longest_prefix_wins() -> None:
    balance = Balance(2)
    story = chunks_of(body("s" * 2000))
    balance.choose(story[:2], {0: 0.0})
    balance.choose(story[:5], {1: 0.0})
    assert balance.choose(story, {0: 0.0, 1: 2.0}) == 1


@pytest.mark.parametrize("least", [0.0, 40.0])
def test_a_replica_above_the_margin_is_passed_over(least: float) -> None:
    balance = Balance(2)
    story = chunks_of(body("s" * 2000))
    balance.choose(story, {0: 0.0})
    most = RATIO * least + MARGIN
    assert balance.choose(story, {0: most, 1: least}) == 0
    assert balance.choose(story, {0: most + 0.1, 1: least}) == 1
    assert balance.choose(story, {0: 0.0, 1: 0.5}) == 0  # both have it now


def test_equal_loads_take_turns() -> None:
    balance = Balance(3)
    assert [balance.choose([], {0: 0.0, 1: 0.0, 2: 0.0}) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_memory_is_bounded_and_ends_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 10)
    balance = Balance(2)
    story, poem = chunks_of(body("s" * 2600))[:8], chunks_of(body("p" * 2600))[:6]
    balance.choose(story, {0: 0.0})
    balance.choose(poem, {0: 0.0})
    assert [balance._shared(0, each) for each in (story, poem)] == [4, 6]
    balance.forget(0)
    assert balance._shared(0, poem) == 0


def test_a_long_body_weighs_more() -> None:
    assert 1 <= weight_of(b"{}") < 1.01
    assert weight_of(b"a" * (16 << 10)) == 3
