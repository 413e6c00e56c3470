"""Assertions that many tests share: refusals, and several tensors or operands at once."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from octavo.numerics import QuantizedTensor
from octavo.testing import assert_bitwise, assert_sqnr


def assert_raises(
    error: type[BaseException], match: str | None, call: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """The call is refused with this error, whose text has `match`, a regular expression; None is any text."""
    with pytest.raises(error, match=match):
        call(*args, **options)


def assert_all_bitwise(found: Iterable[torch.Tensor | None], wanted: Iterable[torch.Tensor | None]) -> None:
    """Tensor by tensor; None where None is wanted."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert (ours is None) == (theirs is None), f"tensor {number}: {ours}, expected {theirs}"
        if ours is not None and theirs is not None:
            assert_bitwise(ours, theirs, f"tensor {number}")


def assert_all_sqnr(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], min_db: float) -> None:
    """Tensor by tensor."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert_sqnr(ours, theirs, min_db, f"tensor {number}")


def assert_codes(found: QuantizedTensor, wanted: QuantizedTensor, what: str = "operand") -> None:
    """Codes and scales are equal in every bit."""
    assert_bitwise(found.qdata, wanted.qdata, f"codes of {what}")
    assert_bitwise(found.scale, wanted.scale, f"scales of {what}")
