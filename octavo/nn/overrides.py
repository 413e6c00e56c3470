"""Which modules a name means, the same everywhere names are given: overrides of a recipe, layers with statistics.

A name is a module's full name, a prefix of full names that ends at a dot, or one dotted part; never a substring.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from octavo.errors import RecipeError

T = TypeVar("T")

# (kind of match, how deep it reaches): larger is more specific
_Rank = tuple[int, int]


def match_rank(pattern: str, name: str) -> _Rank | None:
    """How specifically a pattern means a module; None where it does not.

    Args:
        pattern: "layers.0.mlp.down_proj" (full name), "layers.0" (prefix) or "down_proj" (one part).
        name: a module's full name.
    Returns:
        A rank to compare: a full name beats a prefix, a longer prefix a shorter one, any prefix a single part (a
        prefix is one place in the model, a part may be in many), and a later part an earlier one.
    """
    wanted, parts = pattern.split("."), name.split(".")
    if wanted == parts:
        return 2, len(parts)
    if parts[: len(wanted)] == wanted and len(wanted) > 1:
        return 1, len(wanted)
    if len(wanted) == 1 and pattern in parts:
        return 0, max(i for i, part in enumerate(parts) if part == pattern)
    return None


def select(patterns: Iterable[str], names: Iterable[str], what: str) -> list[str]:
    """The names that any pattern means, in the order of names.

    Args:
        what: for the error: what the patterns are, such as "layers".
    Raises:
        RecipeError: a pattern that means none of the names.
    """
    names = list(names)
    patterns = list(patterns)
    for pattern in patterns:
        _check_known(pattern, names, what)
    return [name for name in names if any(match_rank(pattern, name) is not None for pattern in patterns)]


def resolve(overrides: Mapping[str, T], names: Iterable[str], what: str) -> dict[str, tuple[str, T]]:
    """For each name that an override means, the most specific one and its value.

    Returns:
        name -> (pattern, value); names that no pattern means are absent.
    Raises:
        RecipeError: a pattern that means none of the names.
    """
    names = list(names)
    for pattern in overrides:
        _check_known(pattern, names, what)
    resolved = {}
    for name in names:
        ranked = [(rank, pattern) for pattern in overrides if (rank := match_rank(pattern, name)) is not None]
        if ranked:
            pattern = max(ranked)[1]
            resolved[name] = pattern, overrides[pattern]
    return resolved


def name_nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal of a name that means nothing: the one that may have been meant, else the nearest three."""
    known = sorted(set(known))
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean {close[0]!r}?"
    few = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"; the nearest names are {', '.join(map(repr, few))}" if few else "; it has no linears"


def checked_names(names: Iterable[str], what: str) -> tuple[str, ...]:
    """The names; refused is what is no list of them: a single string, whose letters they would be, a filter, modules.

    Raises:
        RecipeError: names are no list of names.
    """
    if isinstance(names, str):
        raise RecipeError(f"{what} takes a list or tuple of names, got the string {names!r}; write {what}=[{names!r}]")
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise RecipeError(
            f"{what} takes a list or tuple of names, got {names!r:.80}; for those that a function chooses write "
            f"{what}=[name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ...]"
        )
    return tuple(names)


def _check_known(pattern: str, names: list[str], what: str) -> None:
    if any(match_rank(pattern, name) is not None for name in names):
        return
    hint = name_nearest(pattern, (*names, *(part for name in names for part in name.split("."))))
    raise RecipeError(
        f"{what} names no linear of this model: {pattern!r}; a name is a full name, a prefix of one that ends at a "
        f"dot, or one dotted part of it, never a substring{hint}"
    )
