"""Typed errors of every layer: each message says what, which rule, what was got and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


def install_extra(name: str) -> str:
    """What to do where a package of an extra is missing; octavo is installed from its checkout, for no index has it."""
    return f"run pip install -e '.[{name}]' in octavo's checkout"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one is nearest to, whatever the case of its letters; None where none is near."""
    by_folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, the end of a refusal of an unknown name; empty where no known one is near."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found!r}?"


class OctavoError(Exception):
    """Base of every error that octavo raises on purpose."""


class ShapeError(OctavoError, ValueError):
    """A tensor's shape breaks a rule of the operation."""


class DtypeError(OctavoError, ValueError):
    """A tensor's dtype is not one that the operation takes."""


class RecipeError(OctavoError, ValueError):
    """An unknown recipe, an unknown recipe field, or a recipe that cannot act here."""


class ConfigError(OctavoError, ValueError):
    """A configuration key or value that is not understood."""


class DataError(OctavoError, ValueError):
    """Training or evaluation data that cannot be used."""


class RequestError(OctavoError, ValueError):
    """A generation request (prompt or sampling parameters) that cannot be honoured."""


class CheckpointError(OctavoError, RuntimeError):
    """A checkpoint that is missing, damaged, incomplete or of another architecture."""


class StorageError(OctavoError, OSError):
    """Files that cannot be written: no space, a read-only disk, a file in the way; the message says where."""

    def __str__(self) -> str:
        return str(self.args[-1])


class BackendError(OctavoError, RuntimeError):
    """The machine or library lacks what was asked for."""


class LostWeightsError(BackendError):
    """Writing new weights failed, and so did taking it back: they are neither the old ones nor the new ones."""


class ExactnessError(OctavoError, RuntimeError):
    """Exact mode was asked for and its guarantee does not hold."""


class NonFiniteError(OctavoError, RuntimeError):
    """A loss, gradient or weight became inf or NaN; the message names the first tensor to go bad."""


class StaleScaleError(OctavoError, RuntimeError):
    """Scales of the KV cache that were made for other weights, or never made at all."""


class HealthError(OctavoError, RuntimeError):
    """A reinforcement-learning step was beyond a limit that ends the run; the message names metric, value and key."""


class StaleCodesError(OctavoError, RuntimeError):
    """A weight was written in a way that octavo did not notice, and its FP8 codes are of older values."""


class KeywordError(OctavoError, TypeError):
    """A keyword that a call does not have, or not with this value; the message names what octavo has instead."""
