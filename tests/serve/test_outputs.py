"""FlatLogprobs: reads like a list of dicts, and holds none where only the sampled tokens' logprobs were asked for."""

import copy
import gc
import pickle

import pytest

from octavo.serve import FlatLogprobs, Logprob

ENTRIES = [{7: Logprob(-0.5)}, {3: Logprob(-1.25)}, {7: Logprob(0.0)}]
RANKED = [{7: Logprob(-0.5, 2), 1: Logprob(-0.25, 1)}, {3: Logprob(-1.25, 1)}]


def flat(entries: list[dict[int, Logprob]], *, is_ranked: bool = False) -> FlatLogprobs:
    """With each entry's first token as the sampled one."""
    made = FlatLogprobs()
    for entry in entries:
        token_id, first = next(iter(entry.items()))
        made.append(token_id, entry if is_ranked else first.logprob)
    return made


@pytest.mark.parametrize(("entries", "is_ranked"), [(ENTRIES, False), (RANKED, True), ([], False)])
def test_it_reads_like_a_list(entries: list[dict[int, Logprob]], is_ranked: bool) -> None:
    found = flat(entries, is_ranked=is_ranked)
    assert [*found] == entries == found and found == entries
    assert len(found) == len(entries) and found[-2:] == entries[-2:] and found[::-1] == entries[::-1]
    assert repr(found) == repr(entries) and bool(found) == bool(entries)
    assert found.sampled == [next(iter(entry.values())).logprob for entry in entries]
    for made in (found.copy(), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert made == found and made.sampled == found.sampled
    with pytest.raises(IndexError):
        found[len(entries)]


def test_what_differs_is_unequal() -> None:
    found = flat(ENTRIES)
    assert found != flat(ENTRIES[:2]) and found != ENTRIES[:2] and found != flat(RANKED, is_ranked=True)
    assert found != flat([ENTRIES[0], {4: Logprob(-1.25)}, ENTRIES[2]])
    assert found != flat([ENTRIES[0], {3: Logprob(-1.5)}, ENTRIES[2]])
    assert found != 3
    assert flat(RANKED, is_ranked=True) != flat(RANKED)  # without ranks


def test_a_copy_does_not_grow() -> None:
    found = flat(ENTRIES)
    kept = found.copy()
    found.append(5, -2.0)
    assert kept == ENTRIES and found[3] == {5: Logprob(-2.0)}


def test_numbers_are_nothing_to_garbage_collection() -> None:
    found = FlatLogprobs()
    gc.collect()
    before = len(gc.get_objects())
    for token_id in range(1000):
        found.append(token_id, -0.1 * token_id)
    assert len(gc.get_objects()) - before < 10
    assert found[999] == {999: Logprob(-0.1 * 999)}
