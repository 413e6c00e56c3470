"""The measured table of where FP8 wins: lookup, and what convert does with it."""

import pytest
import torch

import octavo
from octavo.errors import RecipeError
from octavo.nn import speed_table
from octavo.numerics import RECIPE_NAMES
from tests.assertions import assert_raises

ROWS = [[1024, 256, 256, None, 0.8, 1.1], [8192, 256, 256, 1.2, 0.9, 1.3], [8192, 1024, 256, None, 1.5, 1.6]]
TABLE = {"device": "a GPU", "recipes": {"blockwise": ROWS}}


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(speed_table, "load_table", lambda: TABLE)


def test_the_nearest_shape_that_is_not_larger_decides(table):
    found = speed_table.measured_speedup("blockwise", 9000, 512, 4096)
    assert found == (8192, 256, 256, 1.2, "a GPU")
    assert speed_table.measured_speedup("blockwise", 9000, 1100, 256).speedup == 1.5
    assert speed_table.measured_speedup("blockwise", 4096, 1024, 1024).speedup == 0.8
    assert speed_table.measured_speedup("blockwise", 512, 4096, 4096) is None
    assert speed_table.measured_speedup("rowwise", 8192, 4096, 4096) is None


def build():
    return torch.nn.ModuleDict({"small": torch.nn.Linear(256, 256), "large": torch.nn.Linear(1024, 256)})


def test_convert_leaves_slower_linears_alone_and_says_so(table):
    report = octavo.convert(build(), "blockwise", num_tokens=8192)
    assert report.fp8_names == ("small", "large")
    model = build()
    report = octavo.convert(model, "blockwise", num_tokens=2048)
    assert report.fp8_names == ()
    assert "0.80x of bf16 at 1024 tokens x 256 x 256" in str(report)
    report = octavo.convert(model, "blockwise", num_tokens=16, overrides={"large": "blockwise"})
    assert report.fp8_names == ("large",)
    assert "smaller than anything" in str(report)
    assert_raises(RecipeError, "num_tokens", octavo.convert, model, "blockwise", num_tokens=0)


def test_the_shipped_table_is_whole():
    shipped = speed_table.load_table()
    assert shipped["device"] and set(shipped["recipes"]) <= set(RECIPE_NAMES)
    for rows in shipped["recipes"].values():
        assert rows and all(len(row) == 6 and row[4] > 0 for row in rows)
