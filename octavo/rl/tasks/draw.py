"""Drawing problems: a hash decides a problem's split, a seed the order; used by every task that makes its own."""

import hashlib
import math
import random
from collections.abc import Callable

from octavo.rl.tasks.protocols import TooFewPromptsError, check_split

_BUCKETS = 1000


def split_of(key: str, heldout_share: float) -> str:
    """The split of whatever the key names."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % _BUCKETS
    return "heldout" if bucket < heldout_share * _BUCKETS else "train"


def draw_distinct(
    make: Callable[[random.Random], str],
    is_wanted: Callable[[str], bool],
    *,
    name: str,
    split: str,
    n: int,
    seed: int,
    share: float,
    num_problems: int,
    remedy: str,
) -> list[str]:
    """`n` distinct problems of one split, in an order that the seed decides: drawn with rejection.

    Args:
        make: a problem from a source of randomness.
        is_wanted: whether a problem is in the split.
        share: of all problems that the split has.
        num_problems: how many there are in all, about.
        remedy: what to do where there are too few.
    Raises:
        ConfigError: another split.
        TooFewPromptsError: it has fewer than `n` problems.
    """
    check_split(split)
    rng = random.Random(f"{name}/{split}/{seed}")
    wanted = 10 + min(n, num_problems)
    found: dict[str, None] = {}
    # the bound is far above what a split that holds n problems needs
    for _ in range(int(20 * wanted * (1 + math.log(wanted)) / share)):
        if len(found) == n:
            break
        problem = make(rng)
        if is_wanted(problem):
            found[problem] = None
    if len(found) < n:
        raise TooFewPromptsError(
            f"the {split} split of this {name} task has about {len(found)} problems, fewer than the {n} asked for; "
            f"{remedy}, or ask for fewer",
            list(found),
        )
    return list(found)
