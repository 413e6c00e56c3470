"""The pairwise cases have all pairs, and the kinds of a row meet every part of the product."""

import itertools

import pytest

from tests.ecosystem import cases


def test_each_two_values_are_in_some_case() -> None:
    for one, other in itertools.combinations(range(4), 2):
        wanted, found = ({(case[one], case[other]) for case in each} for each in (cases.PRODUCT, cases.PAIRWISE))
        assert found == wanted
    assert len(cases.PAIRWISE) == 6


@pytest.mark.parametrize("num_kinds", [2, 3, 4])
def test_every_kind_meets_every_value_of_the_product(num_kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "IS_WHOLE", True)
    kinds = [{"kind": kind} for kind in range(num_kinds)]
    found = [case for ranks in (1, 2) for case in cases.cases(ranks, dict, *kinds)]
    assert len(found) == 24
    for column in ("recipe", "accumulation", "resumed"):
        pairs = {(str(case[column]).split("-")[0], case["kind"]) for case in found}
        assert len(pairs) == (3 if column == "recipe" else 2) * num_kinds
