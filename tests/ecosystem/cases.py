"""The cases of a trainer's row: recipe, ranks, micro-batches a step, fresh or resumed; pairs of them, or all 24."""

import itertools
import os
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C")
IS_WHOLE = {"0": False, "1": True}[os.environ.get("OCTAVO_WHOLE_PRODUCT", "0")]
PRODUCT = list(itertools.product(("blockwise", "rowwise", "delayed"), (1, 2), (1, 4), (False, True)))
PAIRWISE = [  # each two values of two columns are in some case
    ("blockwise", 1, 1, False),
    ("rowwise", 1, 4, True),
    ("delayed", 1, 4, False),
    ("blockwise", 2, 4, True),
    ("rowwise", 2, 1, False),
    ("delayed", 2, 1, True),
]


def cases(ranks: int, make: Callable[..., C], *kinds: dict[str, Any]) -> list[C]:
    """What make(recipe=, accumulation=, resumed=, and a kind's own fields) returns, for each case of so many ranks.

    kinds: what the framework has besides, as ZeRO's stages; they take turns, so that the product meets them all.
    Delayed scaling has two variants. A state that one rank saved must be that of all: only "recent" scales would show
    it. Under stage 3 each gather of a weight is quantized again, with the scale of that micro-batch: micro-batches have
    the bits of plain torch where scales change once a step.
    """
    of_ranks = [(*case[:1], *case[2:]) for case in (PRODUCT if IS_WHOLE else PAIRWISE) if case[1] == ranks]
    found = []
    for i, (recipe, accumulation, resumed) in enumerate(of_ranks):
        kind = kinds[(i + i // 4) % len(kinds)] if kinds else {}  # in the product a recipe has 4, each with another
        if recipe == "delayed" and kind.get("stage") == 3 and accumulation > 1:
            recipe = "delayed-step"
        elif recipe == "delayed" and ranks > 1 and resumed:
            recipe = "delayed-recent"
        found.append(make(recipe=recipe, accumulation=accumulation, resumed=resumed, **kind))
    return found
