"""Who may begin: pages are to last to the end of all whose length is known."""

import pytest

from octavo.serve.engine.admission import KVCapacityForecast
from octavo.serve.engine.page_manager import PageManager
from octavo.serve.engine.sequence import Sequence
from octavo.serve.sampling_params import SamplingParams

PAGE = 4


def make(tokens: int, end: int, *, can_stop: bool = False) -> Sequence:
    stop_ids = frozenset({7} if can_stop else ())
    return Sequence(0, list(range(tokens)), tokens, SamplingParams(), 0, end, stop_ids)


def running(manager: PageManager, *sequences: Sequence) -> list[Sequence]:
    for seq in sequences:
        assert manager.allocate(seq) is not None
    return list(sequences)


@pytest.mark.parametrize(
    ("running_from", "new_to"),
    [
        (4, 12),  # two that end together, each with 3 pages
        (8, 20),  # after 4 steps the first ends with 3 pages, the second has 3 then, and 5 at its end 8 steps later
    ],
)
def test_pages_must_last_to_the_end_and_those_that_come_back_in_time_count(running_from: int, new_to: int) -> None:
    for pages, begins in ((6, True), (5, False)):
        manager = PageManager(pages, PAGE)
        outlook = KVCapacityForecast(manager, running(manager, make(running_from, 12)))
        assert outlook.begin(make(running_from, new_to)) == begins


def test_a_refusal_changes_nothing_and_admissions_add_up() -> None:
    manager = PageManager(8, PAGE)
    outlook = KVCapacityForecast(manager, running(manager, make(4, 12)))
    assert not outlook.begin(make(4, 40))
    assert outlook.begin(make(4, 12))
    assert not outlook.begin(make(4, 12))
    assert outlook.begin(make(4, 8))


def test_whoever_is_alone_begins() -> None:
    assert KVCapacityForecast(PageManager(2, PAGE), []).begin(make(4, 400))


def test_others_are_taken_to_stay_as_they_are() -> None:
    manager = PageManager(8, PAGE)
    sequences = running(manager, make(12, 400, can_stop=True), make(4, 12))
    assert sequences[0].known_final_len == 0
    assert not KVCapacityForecast(manager, sequences).begin(make(4, 12))  # 3 + 3 + 3
    assert KVCapacityForecast(manager, sequences).begin(make(4, 8))


def test_shared_pages_count_once() -> None:
    manager = PageManager(5, PAGE)
    first = make(9, 12)
    running(manager, first)
    manager.cache_full_pages(first, 0, 9)
    second = make(9, 12)
    running(manager, second)
    assert manager.num_used_pages == 4
    outlook = KVCapacityForecast(manager, [first, second])
    assert outlook.begin(make(1, 4))
    assert not outlook.begin(make(1, 4))
