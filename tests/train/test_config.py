"""What a training recipe may say, and how it is refused."""

from pathlib import Path

import pytest

from octavo.config import load_config
from octavo.errors import ConfigError
from octavo.numerics import Format
from octavo.train.config import DataSection, PrecisionSection, TrainConfig


def load(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return load_config(TrainConfig, path, overrides)


def test_every_section_has_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == TrainConfig()


def test_set_overrides_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, "[run]\nsteps = 50\n", "run.steps=70", "precision.recipe=rowwise")
    assert (config.run.steps, config.precision.recipe) == (70, "rowwise")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nseqlen = 4\n", r"unknown key data.seqlen; did you mean data.seq_len\?"),
        ("[run]\nsteps = 'many'\n", "run.steps"),
        ("[run]\nsteps = 0\n", "run.steps must be greater than 0, got 0"),
        ("[data]\nbatch_size = 6\nmicro_batch_size = 4\n", "data: batch_size=6 must be a multiple"),
        ("[schedule]\nwarmup_steps = 9\n[run]\nsteps = 9\n", "schedule.warmup_steps=9 must be below run.steps=9"),
        ("[precision]\nrecipe = 'fp9'\n", "precision: unknown recipe 'fp9'"),
        ("[precision]\nrecipe = 'rowwise'\nmargin = 2\n", "recipe 'rowwise' has no field 'margin'"),
        ("[precision]\nrecipe = 'rowwise'\ndtype = 'fp32'\n", "dtype 'fp32' goes with recipe 'bf16'"),
        ("[optimizer]\nlr = nan\n", "optimizer.lr"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_recipe_fields_reach_the_recipe() -> None:
    section = PrecisionSection(recipe="delayed", fp8_format="e4m3", margin=2, amax_history_len=16)
    recipe = section.make_recipe()
    assert recipe.fp8_format is Format.E4M3
    assert recipe.delayed is not None
    assert (recipe.delayed.margin, recipe.delayed.amax_history_len) == (2, 16)


def test_number_of_micro_batches() -> None:
    assert DataSection(batch_size=8).num_micro_batches == 1
    assert DataSection(batch_size=8, micro_batch_size=2).num_micro_batches == 4
