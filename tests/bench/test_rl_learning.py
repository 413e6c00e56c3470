"""The RL gate: its variants differ in precision alone, what it complains of, and a toy run of both variants."""

from pathlib import Path

import pytest

from bench.rl_matrix.rl_learning import MAX_GAP, VARIANTS, LearningRun, find_complaints, main, make_config, make_record


def outcome(variant: str, seed: int, after: float, *, before: float = 0.3, diff: float = 0.0) -> LearningRun:
    return LearningRun(variant, seed, before, after, 0.3, 0.7, diff, 1000, 60.0)


CONTROL = [outcome("bf16", seed, 0.85, diff=0.02) for seed in range(3)]


def test_the_control_differs_in_precision_alone(tmp_path: Path) -> None:
    exact, bf16 = (make_config(variant, 1, 120, tmp_path) for variant in VARIANTS)
    assert exact.exact and exact.rollout_numerics.recipe.is_fp8 and exact.rollout_numerics.kv_cache_dtype == "fp8"
    for numerics in (bf16.trainer_numerics, bf16.rollout_numerics):
        assert not numerics.recipe.is_fp8 and numerics.kv_cache_dtype == "bf16" and not numerics.exact
    assert exact.model_dump(exclude={"exact", "precision"}) == bf16.model_dump(exclude={"exact", "precision"})


def test_what_learns_as_the_control_does_passes() -> None:
    assert not find_complaints([*(outcome("exact", seed, 0.85 - MAX_GAP + 0.01) for seed in range(3)), *CONTROL])


def test_what_learns_less_than_the_control_is_a_complaint() -> None:
    """By means: a single seed that is low is noise. Each climbs by more than asked all the same."""
    found = [outcome("exact", seed, 0.85 - gap) for seed, gap in enumerate((0.09, 0.09, 0.0))]
    (complaint,) = find_complaints([*found, *CONTROL])
    assert complaint == "mean held-out accuracy is -0.060 from the bf16 control's, at most -0.05 is allowed"


def test_what_does_not_climb_or_is_not_exact_is_a_complaint() -> None:
    found = [outcome("exact", 0, 0.85, before=0.7), outcome("exact", 1, 0.85, diff=1e-7), outcome("exact", 2, 0.85)]
    assert find_complaints([*found, *CONTROL]) == [
        "seed 0 climbs by +0.150, less than 0.25",
        "seed 1 has a logprob that differs by 1e-07",
    ]


def test_the_record_has_both_variants_and_their_gap() -> None:
    found = [outcome("exact", seed, after) for seed, after in enumerate((0.80, 0.86, 0.83))]
    rows = {(row["case"], row["metric"]): row for row in make_record([*found, *CONTROL], 120).rows}
    gap = rows["exact, all seeds", "held-out accuracy to bf16's, seed by seed"]
    assert (gap["value"], gap["p20"], gap["p80"]) == pytest.approx((-0.02, -0.05, 0.01))
    assert rows["bf16, all seeds", "held-out accuracy"]["value"] == 0.85
    assert rows["bf16, seed 2", "max |delta logprob|"]["value"] == 0.02


@pytest.mark.largest
def test_a_toy_of_both_variants_writes_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--processes", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "exact, seed 0: held-out accuracy" in said and "bf16, seed 0: held-out accuracy" in said
    assert not list(tmp_path.iterdir())
