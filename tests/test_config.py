"""octavo.config and octavo.env: what they accept, and that each refusal names key, value and remedy."""

from pathlib import Path
from typing import Literal, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from octavo import env
from octavo.config import Config, load_config, sections_of
from octavo.errors import ConfigError, nearest
from tests.assertions import assert_raises


class Optimizer(Config):
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    kind: Literal["adamw", "sgd"] = "adamw"


class Variant(Config):
    recipe: str = "bf16"


class Run(Config):
    steps: int
    path: Path = Path("runs")
    fused: bool = True
    optimizer: Optimizer = Optimizer()
    variants: tuple[Variant, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer.kind == "sgd" and self.steps > 100:
            raise ValueError(f"sgd takes 100 steps at most, got steps={self.steps}")
        return self


def load(tmp_path: Path, text: str, *overrides: str) -> Run:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load_config(Run, file, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_toml_becomes_typed_values(tmp_path: Path) -> None:
    text = 'steps = 5\npath = "a/b"\n[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n[[variants]]\nrecipe = "rowwise"\n'
    assert load(tmp_path, text) == Run(
        steps=5,
        path=Path("a/b"),
        optimizer=Optimizer(lr=1.0, betas=(0.8, 0.9)),
        variants=(Variant(recipe="rowwise"),),
    )


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("steps=7", None, "steps", 7),
        ("path=runs/first", None, "path", Path("runs/first")),
        ("path='5'", None, "path", Path("5")),
        ("fused=false", None, "fused", False),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.lr = 3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.kind=sgd", "optimizer", "kind", "sgd"),
        ("optimizer.betas=[0, 0.5]", "optimizer", "betas", (0.0, 0.5)),
    ],
)
def test_override(tmp_path: Path, override: str, section: str | None, key: str, value: object) -> None:
    run = load(tmp_path, "steps = 5", override)
    assert getattr(getattr(run, section) if section else run, key) == value


def test_later_override_wins_over_file_and_earlier(tmp_path: Path) -> None:
    assert load(tmp_path, "steps = 5", "steps=6", "steps=7").steps == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stpes = 5\nsteps = 5", "unknown key stpes; did you mean steps?"),
        ("steps = 5\n[optimizer]\nlrr = 1.0", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("steps = 5\nlr = 1.0", "unknown key lr; did you mean optimizer.lr?"),
        ("steps = 5\n[[variants]]\nrecipes = 'x'", "unknown key variants.0.recipes; did you mean variants.0.recipe?"),
        (
            "steps = 5\nzzz = 1",
            "unknown key zzz; the known keys here are fused, optimizer, path, steps, variants",
        ),
        ("", "steps is required and is not set"),
        ("steps = 'five'", 'steps must be a valid integer, got "five" (str)'),
        ("steps = '5'", 'steps must be a valid integer, got "5" (str)'),
        ("steps = 5.0", "steps must be a valid integer, got 5.0 (float)"),
        ("steps = 5\nfused = 1", "fused must be a valid boolean, got 1 (int)"),
        ("steps = 5\noptimizer = 3", "optimizer must be"),
        ("steps = 5\n[optimizer]\nlr = -1.0", "optimizer.lr must be greater than 0, got -1.0 (float)"),
        ("steps = 5\n[optimizer]\nlr = nan", "optimizer.lr must be a finite number"),
        (
            "steps = 5\n[optimizer]\nkind = 'adam'",
            "optimizer.kind must be 'adamw' or 'sgd', got \"adam\" (str); did you mean 'adamw'?",
        ),
        ("steps = 5\n[optimizer]\nkind = 'SGD'", "got \"SGD\" (str); did you mean 'sgd'?"),
        ("steps = 5\nlr = \n", "not valid TOML: Invalid value (at line 2, column 6)"),
    ],
)
def test_refusal_names_the_file_and_the_fault(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(f"{tmp_path / 'run.toml'}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lrr=1", "command line: unknown key optimizer.lrr; did you mean optimizer.lr?"),
        (
            "section.key=1",
            "command line: unknown key section; the known keys here are fused, optimizer, path, steps, variants",
        ),
        ("steps=many", 'command line: steps must be a valid integer, got "many" (str)'),
        ("optimizer.kind=lion", "command line: optimizer.kind must be 'adamw' or 'sgd', got \"lion\" (str)"),
        ("steps", "--set 'steps': must have the form section.key=value"),
        ("=5", "--set '=5': must have the form section.key=value"),
        ("a..b=5", "--set 'a..b=5': must have the form section.key=value"),
        ("steps.x=5", "--set 'steps.x=5': steps is a value, not a section"),
    ],
)
def test_refused_override_is_named_as_such(tmp_path: Path, override: str, expected: str) -> None:
    assert refusal(tmp_path, "steps = 5", override) == expected


def test_a_rule_over_several_keys_names_what_came_from_outside(tmp_path: Path) -> None:
    text, rule = "steps = 101", "sgd takes 100 steps at most, got steps=101"
    file = tmp_path / "run.toml"
    assert refusal(tmp_path, text, "optimizer.kind=sgd") == f"{file} with optimizer.kind of the command line: {rule}"
    assert refusal(tmp_path, text + "\n[optimizer]\nkind = 'sgd'") == f"{file}: {rule}"


def test_every_fault_has_its_line(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, "steps = 'a'\nfused = 3\nx = 1").splitlines()) == 3


def test_missing_file_and_directory(tmp_path: Path) -> None:
    assert_raises(ConfigError, r"none\.toml: no such config file", load_config, Run, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"^configs/none\.toml: .*configs/ lies in the project's checkout"):
        load_config(Run, "configs/none.toml")
    assert_raises(ConfigError, "cannot read this config file", load_config, Run, tmp_path)


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("min_token", "min_tokens", "min_tokens"),
        ("FP8_block", "fp8-block", "fp8-block"),
        ("skip_special_tokens", "min_tokens", None),
        ("optimization_level", "repetition_penalty", None),
    ],
)
def test_a_name_is_near_only_where_it_may_be_a_slip(name: str, known: str, found: str | None) -> None:
    assert nearest(name, [known]) == found


def test_a_missing_file_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train_tiny.toml").touch()
    for given in ("configs/train_tyni.toml", "train_tiny.toml", "train_tiny", "elsewhere/Train-Tiny.toml"):
        with pytest.raises(ConfigError, match=r"no such config file; did you mean configs/train_tiny\.toml\?$"):
            load_config(Run, given)
    (tmp_path / "train_tiny.toml").touch()
    assert_raises(ConfigError, r"did you mean train_tiny\.toml\?$", load_config, Run, "train_tiny")


def test_the_former_folder_is_taken_for_one_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/first.toml").write_text("steps = 5\n[optimizer]\nkind = 'adamw'\n")
    assert sections_of("recipes/first.toml") == {"steps", "optimizer"} and sections_of("recipes/none.toml") == set()
    for folder in (Path(), tmp_path):
        with pytest.warns(DeprecationWarning, match="next release") as warned:
            assert load_config(Run, folder / "recipes/first.toml").steps == 5
        assert [str(warning.message) for warning in warned] == [
            f"{folder / 'recipes/first.toml'} leaves octavo with the next release; use {folder / 'configs/first.toml'}"
        ]
        assert warned[0].filename == __file__
    Path("recipes").mkdir()
    Path("recipes/first.toml").write_text("steps = 6\n")
    assert load_config(Run, "recipes/first.toml").steps == 6  # a folder of the user's own


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    assert_raises(ConfigError, "not valid TOML", load_config, Run, tmp_path / "run.toml")


def test_python_construction_refuses_alike() -> None:
    assert_raises(ConfigError, r"^Run: unknown key stpes; did you mean steps\?$", Run, steps=1, stpes=2)
    with pytest.raises(ConfigError, match=r"^Run: unknown key optimizer\.lrr; did you mean optimizer\.lr\?$"):
        Run(steps=1, optimizer={"lrr": 1.0})
    assert_raises(ConfigError, r"^Optimizer: lr must be greater than 0, got -1 \(int\)$", Optimizer, lr=-1)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Run(steps=1).steps = 2


@pytest.mark.parametrize(("text", "value"), [("", False), ("1", True), ("TRUE", True), ("off", False)])
def test_force_reference(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("OCTAVO_FORCE_REFERENCE", text)
    assert env.force_reference() is value


def test_force_reference_refuses_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_FORCE_REFERENCE", "maybe")
    assert_raises(ConfigError, r"OCTAVO_FORCE_REFERENCE must be one of 1, true.*got 'maybe'", env.force_reference)
