"""Fingerprints name what differs, and change with a single bit."""

import json
from pathlib import Path

import pytest
import torch

from bench import fingerprint as program
from bench.fingerprint import REFUSED, ModelCase, all_cases, choose_cases, compare, digest, fingerprint, main
from octavo.errors import RecipeError


def test_two_runs_have_the_same_fingerprints_and_another_recipe_has_not() -> None:
    case = ModelCase("rowwise", "autocast", "bf16", "ragged")
    first, second = fingerprint(case, "cpu"), fingerprint(case, "cpu")
    other = fingerprint(ModelCase("blockwise", "autocast", "bf16", "ragged"), "cpu")
    assert compare({"it": first}, {"it": second}) == []
    lines = compare({"it": first}, {"it": other})
    assert [line.split(": ")[1] for line in lines] == ["gradients", "outputs", "parameters"]


def test_one_bit_is_seen() -> None:
    x = torch.zeros(3)
    assert digest([x]) != digest([torch.nextafter(x, torch.ones(3))])
    assert digest([x]) != digest([x.view(3, 1)])
    assert digest([x]) == digest([x.clone()])


def test_the_parts_are_the_whole() -> None:
    parts = [choose_cases([], (part, 3)) for part in (1, 2, 3)]
    assert sorted(str(case) for part in parts for case in part) == sorted(str(case) for case in all_cases())


def test_a_refused_case_is_recorded_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tree may refuse what the other runs: that is a difference, and both refusing is none."""
    hashes = {"losses": "1"}

    def run(case: ModelCase, device: str) -> dict[str, str]:
        if case.recipe == "mxfp8":
            raise RecipeError("no such kernel")
        return hashes

    monkeypatch.setattr(program, "fingerprint", run)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    flags = ["--device", "cpu", "--filter", "gptj-even-bf16", "--write"]
    assert main([*flags, str(first)]) == 0
    cases = json.loads(first.read_text())["cases"]
    assert cases["gptj-even-bf16-mxfp8"] == {REFUSED: "no such kernel"} and cases["gptj-even-bf16-rowwise"] == hashes
    assert main(["--compare", str(first), str(first)]) == 0
    cases["gptj-even-bf16-mxfp8"] = hashes
    second.write_text(json.dumps({"cases": cases}))
    assert main(["--compare", str(first), str(second)]) == 1
