"""What a training config may say, and how it is refused."""

from pathlib import Path

import pytest

from octavo.config import load_config
from octavo.errors import ConfigError
from octavo.numerics import Format
from octavo.train.config import DataSection, PrecisionSection, TrainConfig
from tests.assertions import assert_raises


def load(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config(TrainConfig, path, overrides)


def test_every_section_has_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == TrainConfig()


TINY = Path(__file__).parents[2] / "configs" / "train_tiny.toml"


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_another_recipe_drops_the_files_fields_that_it_lacks(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(TrainConfig, TINY, [f"precision.recipe={recipe}", "run.dir=runs/other"])
    assert (config.precision.recipe, config.precision.fp8_format) == (recipe, None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "dropped precision.fp8_format = 'hybrid'" in said[0]
    assert f"recipe {recipe!r}, which --set names, has no such field" in said[0]


def test_another_recipe_keeps_the_files_fields_that_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "[precision]\nrecipe = 'delayed'\nbackward = 'bf16'\nmargin = 2\namax_history_len = 4\n"
    precision = load(tmp_path, text, "precision.recipe=nvfp4").precision
    assert (precision.backward, precision.margin, precision.amax_history_len) == ("bf16", None, None)
    assert "dropped precision.margin = 2, precision.amax_history_len = 4:" in capsys.readouterr().err
    assert load(tmp_path, text, "precision.recipe=delayed").precision.margin == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", ["precision.fp8_format=e4m3"], "recipe 'bf16' has no field 'fp8_format'"),
        ("fp8_format = 'hybrid'\n", ["precision.fp8_format=e4m3"], "recipe 'bf16' has no field 'fp8_format'"),
        ("fp8_format = 'e4m4'\n", [], "precision.fp8_format must be 'hybrid' or 'e4m3', got \"e4m4\""),
        ("fp8_formt = 'hybrid'\n", [], "unknown key precision.fp8_formt"),
        ("fp8_format = 'hybrid'\n", ["precision.recipe=bf61"], "unknown recipe 'bf61'"),
    ],
)
def test_another_recipe_hides_no_mistake(tmp_path, text, overrides, message, capsys):
    assert_raises(ConfigError, message, load, tmp_path, f"[precision]\n{text}", "precision.recipe=bf16", *overrides)
    assert "dropped" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nseqlen = 4\n", r"unknown key data.seqlen; did you mean data.seq_len\?"),
        ("[run]\nsteps = 'many'\n", "run.steps"),
        ("[run]\nsteps = 0\n", "run.steps must be greater than 0, got 0"),
        ("[run]\nseed = 18446744073709551616\n", "run.seed must be less than 18446744073709551616, got"),
        ("[data]\nbatch_size = 6\nmicro_batch_size = 4\n", "data: batch_size=6 must be a multiple"),
        (
            "[schedule]\nwarmup_steps = 9\n[run]\nsteps = 9\n",
            "raise run.steps, or set both: --set run.steps=9 --set schedule.warmup_steps=0",
        ),
        ("[precision]\nrecipe = 'fp9'\n", "precision: unknown recipe 'fp9'"),
        ("[precision]\nrecipe = 'rowwise'\nmargin = 2\n", "recipe 'rowwise' has no field 'margin'"),
        ("[precision]\nrecipe = 'rowwise'\ndtype = 'fp32'\n", "dtype 'fp32' goes with recipe 'bf16'"),
        ("[optimizer]\nlr = nan\n", "optimizer.lr"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    assert_raises(ConfigError, message, load, tmp_path, text)


def test_recipe_fields_reach_the_recipe() -> None:
    section = PrecisionSection(recipe="delayed", fp8_format="e4m3", margin=2, amax_history_len=16)
    recipe = section.make_recipe()
    assert recipe.fp8_format is Format.E4M3
    assert recipe.delayed is not None
    assert (recipe.delayed.margin, recipe.delayed.amax_history_len) == (2, 16)


def test_number_of_micro_batches() -> None:
    assert DataSection(batch_size=8).num_micro_batches == 1
    assert DataSection(batch_size=8, micro_batch_size=2).num_micro_batches == 4
