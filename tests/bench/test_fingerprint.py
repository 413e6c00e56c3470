"""Fingerprints name what differs, and change with a single bit."""

import torch

from bench.fingerprint import Case, all_cases, compare, digest, fingerprint


def test_the_cases_are_all_recipes_by_all_kinds_of_models() -> None:
    cases = {str(case) for case in all_cases()}
    assert len(cases) == 7 * 5 * 2 * 2 and "qwen3_moe-ragged-fp32-delayed" in cases


def test_two_runs_have_the_same_fingerprints_and_another_recipe_has_not() -> None:
    case = Case("rowwise", "autocast", "bf16", "ragged")
    first, second = fingerprint(case, "cpu"), fingerprint(case, "cpu")
    other = fingerprint(Case("blockwise", "autocast", "bf16", "ragged"), "cpu")
    assert compare({"it": first}, {"it": second}) == []
    lines = compare({"it": first}, {"it": other})
    assert [line.split(": ")[1] for line in lines] == ["gradients", "outputs", "parameters"]


def test_one_bit_is_seen() -> None:
    x = torch.zeros(3)
    assert digest([x]) != digest([torch.nextafter(x, torch.ones(3))])
    assert digest([x]) != digest([x.view(3, 1)])
    assert digest([x]) == digest([x.clone()])
