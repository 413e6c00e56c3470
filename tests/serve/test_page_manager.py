"""PageManager: pages are never lost, shared or found wrongly, whatever happens in whatever order."""

import random

import pytest

from octavo.serve.engine.page_manager import PageManager
from octavo.serve.engine.sequence import Sequence
from octavo.serve.sampling_params import SamplingParams

PAGE = 4


def make_seq(token_ids: list[int]) -> Sequence:
    return Sequence(0, list(token_ids), len(token_ids), SamplingParams(), seed=0, max_len=1 << 20)


def allocate(manager: PageManager, token_ids: list[int]) -> tuple[Sequence, int | None]:
    """A sequence whose full pages are all written at once."""
    seq = make_seq(token_ids)
    num_cached = manager.allocate(seq)
    if num_cached is not None:
        manager.cache_full_pages(seq, num_cached, seq.num_tokens)
    return seq, num_cached


def test_prefix_is_shared_and_one_token_is_always_left() -> None:
    manager = PageManager(8, PAGE)
    first, cached = allocate(manager, list(range(8)))
    assert cached == 0
    again, cached = allocate(manager, list(range(8)))
    assert cached == 4  # the last page is full, but its last token must be computed for logits
    assert again.page_table[0] == first.page_table[0]
    assert again.page_table[1] != first.page_table[1]
    longer, cached = allocate(manager, list(range(9)))
    assert cached == 8
    assert longer.page_table[:2] == first.page_table
    manager.check_integrity([first, again, longer])


def test_equal_hashes_of_other_tokens_are_no_hit() -> None:
    manager = PageManager(8, PAGE)
    first, _ = allocate(manager, [0, 1, 2, 3, 4])
    other = make_seq([5, 5, 5, 5, 4])
    other.page_hashes = list(first.page_hashes)  # a collision
    assert manager.allocate(other) == 0
    manager.check_integrity([first, other])


def test_salt_forgets_and_separates() -> None:
    manager = PageManager(8, PAGE, salt="version 1")
    seq, _ = allocate(manager, list(range(9)))
    with pytest.raises(AssertionError, match="in use"):
        manager.reset_prefix_cache("version 2")
    manager.free(seq)
    manager.reset_prefix_cache("version 2")
    again, cached = allocate(manager, list(range(9)))
    assert cached == 0
    assert again.page_hashes[0] != seq.page_hashes[0]


def test_freed_pages_stay_findable_and_the_least_recently_used_go_first() -> None:
    manager = PageManager(4, PAGE)
    for start in (0, 100):
        seq, _ = allocate(manager, list(range(start, start + 8)))
        manager.free(seq)
    manager.check_integrity([])
    assert manager.num_free_pages == 4
    third, _ = allocate(manager, [200, 201, 202, 203])  # takes the page that was freed first: 0's second
    revived, cached = allocate(manager, list(range(100, 109)))
    assert cached == 8
    manager.check_integrity([third, revived])
    manager.free(revived)
    manager.free(third)
    # what is left of the first sequence had to give way to the revived one's third page
    _, cached = allocate(manager, [*range(4), 4])
    assert cached == 0


def test_too_few_pages_change_nothing() -> None:
    manager = PageManager(3, PAGE)
    seq, _ = allocate(manager, list(range(8)))
    manager.free(seq)
    revivable = make_seq([*range(8), *range(50, 57)])  # shares 2 pages, needs 2 more, 1 is left
    assert manager.allocate(revivable) is None
    assert revivable.page_table == []
    manager.check_integrity([])
    seq, _ = allocate(manager, list(range(12)))
    seq.token_ids.append(12)
    assert not manager.grow(seq)
    assert len(seq.page_table) == 3
    manager.check_integrity([seq])


@pytest.mark.parametrize("seed", range(4))
def test_random_walk_keeps_its_books(seed: int) -> None:
    """Few tokens and short prompts, so that prefixes meet; a shadow of each page's content checks every hit."""
    rng = random.Random(seed)
    manager = PageManager(rng.choice([5, 9, 24]), PAGE, enable_prefix_caching=seed != 3)
    living: list[Sequence] = []
    content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end
    num_hits = 0
    for step in range(600):
        action = rng.random()
        if action < 0.45:
            seq = make_seq([rng.randrange(2) for _ in range(rng.randrange(1, 18))])
            num_cached = manager.allocate(seq)
            if num_cached is not None:
                num_hits += num_cached
                assert num_cached < seq.num_tokens
                for index in range(num_cached // PAGE):
                    assert content[seq.page_table[index]] == tuple(seq.token_ids[: (index + 1) * PAGE])
                write(manager, seq, num_cached, content)
                living.append(seq)
        elif action < 0.75 and living:
            seq = rng.choice(living)
            seq.token_ids.append(rng.randrange(2))
            if manager.grow(seq):
                write(manager, seq, seq.num_tokens - 1, content)
            else:
                seq.token_ids.pop()
        elif living:
            manager.free(living.pop(rng.randrange(len(living))))
        if not living and step % 7 == 0:
            manager.reset_prefix_cache(f"salt {step}")
        manager.check_integrity(living)
        assert manager.num_used_pages + manager.num_free_pages == manager.num_pages
    assert (num_hits > 0) == (seed != 3)


def write(manager: PageManager, seq: Sequence, start: int, content: dict[int, tuple[int, ...]]) -> None:
    manager.cache_full_pages(seq, start, seq.num_tokens)
    for index in range(start // PAGE, manager.pages_for(seq.num_tokens)):
        content[seq.page_table[index]] = tuple(seq.token_ids[: (index + 1) * PAGE])
