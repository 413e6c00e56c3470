"""Former names of keywords mean what today's mean, with a warning that names the new one where the call stands."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import octavo
from octavo import doctor
from octavo.deprecation import former_keywords
from octavo.doctor import find_departure
from octavo.errors import OctavoError
from octavo.models import CalibrationText, ModelConfig, load_model
from octavo.numerics import Numerics, get_recipe
from octavo.ops.attention import attention_paged
from octavo.qdq import insert
from tests.assertions import assert_raises


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16))


def set_numerics(**keywords: object) -> object:
    decoder = load_model(ModelConfig("llama", 32, 32, 32, 1, 1, 1, 32))
    return decoder.set_numerics(Numerics(get_recipe("rowwise")), **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda **names: octavo.convert(model(), "rowwise", **names),
        lambda **names: octavo.amp.initialize(model(), None, **names),  # type: ignore[arg-type]
        lambda **names: find_departure(model(), torch.sum, **names),  # type: ignore[arg-type]
        lambda **names: insert(model(), len, **names),  # type: ignore[arg-type]
        set_numerics,
    ],
    ids=["convert", "initialize", "find_departure", "insert", "set_numerics"],
)
def test_skip_is_the_former_name_of_ignore(call: Callable[..., object]) -> None:
    with pytest.raises(OctavoError) as expected:
        call(ignore=("0", "absent"))
    with pytest.warns(DeprecationWarning, match="use ignore") as warned, pytest.raises(OctavoError) as found:
        call(skip=("0", "absent"))
    assert str(found.value) == str(expected.value)
    assert [warning.filename for warning in warned] == [__file__]


def test_autocast_takes_skip() -> None:
    plain, x = model(), torch.randn(4, 16).bfloat16()
    with pytest.warns(DeprecationWarning, match="use ignore"), octavo.autocast(recipe="rowwise", skip=[plain]):  # type: ignore[call-arg]
        out = plain(x)
    assert torch.equal(out, plain(x))


@pytest.mark.parametrize(
    ("former", "name"), [("num_samples", "num_calibration_samples"), ("seq_len", "max_seq_length")]
)
def test_a_class_takes_former_names(former: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"use {name}") as warned:
        assert getattr(CalibrationText(**{former: 3}), name) == 3  # type: ignore[arg-type]
    assert [warning.filename for warning in warned] == [__file__]


def test_a_module_knows_former_names() -> None:
    with pytest.warns(DeprecationWarning, match="Subject leaves .*; use ModelUnderTest") as warned:
        assert doctor.Subject is doctor.ModelUnderTest
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.raises(AttributeError, match=r"module 'octavo\.doctor' has no attribute 'subjects'"):
        doctor.subjects  # noqa: B018


def test_both_names_are_refused() -> None:
    @former_keywords(skip="ignore")
    def call(*, ignore: int) -> int:
        return ignore

    assert call(ignore=1) == 1
    assert_raises(TypeError, "skip is the former name of ignore", call, ignore=1, skip=1)
    said = "block_tables is the former name of page_tables"
    assert_raises(TypeError, said, attention_paged, page_tables=0, block_tables=0)
