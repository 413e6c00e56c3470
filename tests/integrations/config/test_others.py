"""NeMo-RL's and slime's FP8 names, the command line, and the config that is printed."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.rl import command
from octavo.config import load_config
from octavo.errors import ConfigError
from octavo.integrations.config import read_nemo, read_slime, read_verl, resolve_config, to_toml
from octavo.integrations.config.nemo import FP8, LOSS, VLLM
from octavo.integrations.config.verl_keys import ROLLOUT, TRANSFORMER
from octavo.numerics.recipe import FORMAT_RECIPES
from octavo.rl.config import RLConfig

ROOT = Path(__file__).parent.parent.parent.parent
CONFIGS = sorted((ROOT / "configs").glob("rl_*.toml"))
BASE = RLConfig(exact=False, trainer={"recipe": "bf16"}, rollout={"recipe": "rowwise"})
USE, TIS = f"{LOSS}.use_importance_sampling_correction=true", f"{LOSS}.truncated_importance_sampling"


def value_of(config: RLConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ([f"{VLLM}.precision=fp8"], "rollout.recipe", "blockwise"),
        ([f"{VLLM}.precision=bfloat16"], "exact", True),
        ([f"{VLLM}.precision=fp8", f"{VLLM}.is_mx=true"], "rollout.recipe", "mxfp8"),
        ([f"{VLLM}.kv_cache_dtype=auto"], "rollout.kv_cache_dtype", "bf16"),
        ([f"{FP8}.enabled=true", f"{FP8}.fp8_recipe=blockwise"], "trainer.recipe", "blockwise"),
        ([f"{FP8}.enabled=true", f"{FP8}.fp8=e4m3"], "trainer.fp8_format", "e4m3"),
        ([f"{FP8}.enabled=true", f"{FP8}.fp8_recipe=blockwise", f"{VLLM}.precision=fp8"], "exact", True),
        ([USE, f"{TIS}_ratio=3"], "correction.kind", "token_tis"),
        ([USE, f"{TIS}_ratio=3"], "correction.cap", 3.0),
        ([USE, f"{TIS}_type=icepop", f"{TIS}_ratio=5", f"{TIS}_ratio_min=0.4"], "correction.kind", "icepop"),
        ([USE, f"{TIS}_type=icepop", f"{TIS}_ratio=5", f"{TIS}_ratio_min=0.4"], "correction.low", 0.4),
    ],
)
def test_nemos_names(keys: list[str], key: str, expected: Any) -> None:
    config, notes = read_nemo(None, keys, BASE)
    assert value_of(config, key) == expected != value_of(BASE, key)
    assert any(f" -> {key} = " in note for note in notes)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([f"{VLLM}.precision=int8"], "octavo has bfloat16 or fp8"),
        ([f"{VLLM}.is_mx=true"], "it has no effect without"),
        ([f"{VLLM}.num_last_layers_in_bf16=2"], "octavo quantizes every linear but lm_head and routers"),
        ([f"{VLLM}.quantization_ignored_layer_kws=[gate]"], "octavo quantizes every linear"),
        ([f"{VLLM}.pow2_weight_scaling_factors=true"], "octavo's scales are fp32 on both sides"),
        ([f"{VLLM}.precision=bfloat16", f"{VLLM}.kv_cache_dtype=fp8"], "NeMo-RL has an FP8 cache with .*=fp8 alone"),
        ([f"{FP8}.fp8_param=true"], "FP8 codes are derived from them"),
        ([f"{FP8}.fp8=hybrid"], "it has no effect without"),
        ([f"{TIS}_ratio=3"], "it has no effect without"),
        ([USE], "octavo's weights have a cap; give loss_fn.truncated_importance_sampling_ratio"),
        ([USE, f"{TIS}_ratio=3", f"{TIS}_ratio_min=0.5"], "have no lower bound; give type icepop"),
        ([USE, f"{TIS}_type=seq-mask-tis", f"{TIS}_ratio=3"], "octavo has tis or icepop"),
        (["grpo.num_prompts_per_step=4"], r"look for the key in octavo's \[rollout\]"),
        (["policy.generation.temperature=0.5"], "FP8 and correction keys alone"),
    ],
)
def test_nemos_other_names_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"NeMo-RL's .* is refused: .*{message}"):
        read_nemo(None, keys, BASE)


@pytest.mark.parametrize("recipe", FORMAT_RECIPES)
def test_every_recipe_with_a_format_is_known_everywhere(recipe: str) -> None:
    verl = read_verl(None, [f"{TRANSFORMER}.fp8=e4m3", f"{TRANSFORMER}.fp8_recipe={recipe}"], BASE)[0]
    nemo = read_nemo(None, [f"{FP8}.enabled=true", f"{FP8}.fp8_recipe={recipe}"], BASE)[0]
    slime = read_slime(["--fp8-format", "e4m3", "--fp8-recipe", recipe], BASE)[0]
    assert {config.trainer.recipe for config in (verl, nemo, slime)} == {recipe}
    assert {config.exact for config in (verl, nemo, slime)} == {recipe == "rowwise"}  # which is BASE's sampler's


def test_what_has_no_effect_of_nemos_is_taken() -> None:
    inert = ("use_deep_gemm=true", "num_first_layers_in_bf16=0", "pow2_activation_scaling_factors=false")
    keys = [*(f"{VLLM}.{key}" for key in inert), f"{VLLM}.quantization_ignored_layer_kws=[]", f"{FP8}.fp8_param=false"]
    assert read_nemo(None, keys, BASE)[0] == BASE


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        (["--fp8-format", "e4m3"], "trainer.fp8_format", "e4m3"),
        (["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"], "trainer.recipe", "blockwise"),
        (["--use-tis"], "correction.kind", "token_tis"),
        (["--use-tis", "--tis-clip=3", "--tis-clip-low", "0"], "correction.cap", 3.0),
        (["--sglang-kv-cache-dtype", "bf16"], "rollout.kv_cache_dtype", "bf16"),
        (["--use-rollout-routing-replay"], "router_replay", True),
    ],
)
def test_slimes_flags(flags: list[str], key: str, expected: Any) -> None:
    assert value_of(read_slime(["--bf16", *flags], BASE)[0], key) == expected != value_of(BASE, key)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fp8-recipe", "blockwise"], "it has no effect without --fp8-format"),
        (["--fp8-param-gather"], "one GPU gathers no parameters"),
        (["--use-routing-replay"], "give --use-rollout-routing-replay"),
        (["--tis-clip", "3"], "it has no effect without --use-tis"),
        (["--use-tis", "--tis-clip-low", "0.5"], "have no lower bound"),
        (["--sglang-mem-fraction-static", "0.7"], r"look for the key in octavo's \[rollout\]"),
        (["--sglang-kv-cache-dtype", "fp8_e5m2"], "octavo has auto or"),
        (["--rollout-batch-size", "32"], "slime's FP8 and correction flags alone"),
    ],
)
def test_slimes_other_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"slime's --.* is refused: .*{message}"):
        read_slime(flags, BASE)


def test_slimes_routes_need_no_replay_in_exact_mode() -> None:
    config, notes = read_slime(["--use-rollout-routing-replay"], RLConfig())
    assert config == RLConfig()
    assert "without a replay" in notes[0]


def test_set_is_read_before_the_framework_s_keys() -> None:
    with pytest.raises(ConfigError, match=r"task.verifier has no effect .*--set is read before verl's keys"):
        resolve_config([*VERL, "data.train_files=a.jsonl"], "verl", ["task.verifier=exact"])


def test_slimes_arguments_begin_with_a_flag() -> None:
    with pytest.raises(ConfigError, match="begin with a flag"):
        read_slime(["3"], BASE)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_printed_recipe_is_the_recipe(path: Path, tmp_path: Path) -> None:
    config = load_config(RLConfig, path)
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(RLConfig, tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "end_to_end"},
        {"precision": "bf16"},
        {"trainer": {"mini_batch_size": 8}},
        {"precision": "linears", "trainer": {"recipe": "rowwise"}},
        {"task": {"name": "callable", "function": "a:b", "options": {"n": 3, "deep": {"x y": [1, 2.5, "\"\\\n'"]}}}},
        {"task": {"name": "questions", "path": "a\tb.jsonl", "end": "\n"}},
    ],
)
def test_levels_and_options_survive_printing(fields: dict[str, Any], tmp_path: Path) -> None:
    config = RLConfig(**fields)
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    again = load_config(RLConfig, tmp_path / "again.toml")
    assert again.model_dump() == config.model_dump()
    assert again.trainer_numerics == config.trainer_numerics


def test_a_printed_recipe_of_epochs_has_no_steps_that_end_them(tmp_path: Path) -> None:
    fields = {"task": {"name": "questions", "path": ["a.jsonl", "b.jsonl"]}, "trainer": {"epochs": 2}}
    for steps in ({}, {"steps": 120}):
        config = RLConfig(**fields | {"trainer": fields["trainer"] | steps})
        (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
        again = load_config(RLConfig, tmp_path / "again.toml")
        assert again == config
        assert ("steps" in again.trainer.model_fields_set) == bool(steps)


VERL = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"]


def test_a_command_line_of_octavos() -> None:
    config, notes = resolve_config([str(CONFIGS[0]), "trainer.steps=3"], overrides=["trainer.steps=2", "run.seed=5"])
    assert (config.trainer.steps, config.run.seed, notes) == (3, 5, [])
    with pytest.warns(DeprecationWarning, match="use resolve_config"):
        from octavo.integrations.config import resolve_recipe
    assert resolve_recipe is resolve_config


def test_a_command_line_of_verls(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "v.yaml").write_text("actor_rollout_ref:\n  rollout:\n    temperature: 0.7\n    n: 2\n")
    config, notes = resolve_config([str(tmp_path / "v.yaml"), *VERL], "verl", ["trainer.steps=3"])
    assert (config.rollout.temperature, config.rollout.samples_per_prompt, config.trainer.steps) == (0.7, 4, 3)
    assert f"{ROLLOUT}.temperature = 0.7 -> rollout.temperature = 0.7" in notes
    over, _ = resolve_config([str(tmp_path / "v.yaml")], "verl", base=CONFIGS[0])
    plain = load_config(RLConfig, CONFIGS[0])
    assert over.algorithm == plain.algorithm
    assert over.rollout.temperature == 0.7


@pytest.mark.parametrize(
    ("arguments", "config_format", "base", "named"),
    [
        ([], "octavo", None, "octavo rl takes a TOML file"),
        (["a.yaml", "x.y=1"], "octavo", None, "--config-format"),
        ([str(CONFIGS[0])], "octavo", "b.toml", "--base b.toml"),
        ([str(CONFIGS[0]), "steps"], "octavo", None, "'steps': must have the form section.key=value"),
        (["a.yaml", "b.yml"], "nemo-rl", None, "a.yaml, b.yml"),
        ([], "verl", "none.toml", "none.toml"),
        ([], "areal", None, "areal"),
        ([str(ROOT / "configs" / "train_tiny.toml")], "octavo", None, "octavo train .*train_tiny.toml"),
    ],
)
def test_bad_command_lines(arguments: list[str], config_format: str, base: str | None, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve_config(arguments, config_format, base=None if base is None else Path(base))


def rl(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["rl", "--show-config", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("former", "now", "arguments"),
    [
        ("--verl", "--config-format verl", VERL),
        ("--nemo", "--config-format nemo-rl", [f"{VLLM}.precision=bfloat16"]),
        ("--slime", "--config-format slime", ["--", "--use-tis"]),
    ],
)
def test_former_options_are_taken_with_a_warning_that_names_the_new_one(
    former: str, now: str, arguments: list[str]
) -> None:
    with pytest.warns(DeprecationWarning, match=f"{former} .*use {now}"):
        before = rl(former, *arguments)
    after = rl(*now.split(), *arguments)
    assert (before.exit_code, before.output) == (after.exit_code, after.output) and after.exit_code == 0
    base = str(CONFIGS[0])
    with pytest.warns(DeprecationWarning, match=f"use --base {base}"):
        before = rl(base, *now.split(), *arguments)
    assert before.output == rl("--base", base, *now.split(), *arguments).output


def test_unsupported_keys_are_ignored_on_demand_and_by_the_former_names() -> None:
    verl = ["--config-format", "verl", *VERL, "trainer.nnodes=2"]
    with pytest.raises(ConfigError, match=r"trainer\.nnodes = 2 (.|\n)*--ignore-unsupported"):
        rl(*verl)
    after = rl(*verl, "--ignore-unsupported")
    assert "dropped: verl's trainer.nnodes" in after.stderr
    with pytest.warns(DeprecationWarning, match="use --ignore-unsupported"):
        assert rl(*verl, "--drop-refused").output == after.output
    for reader, keys in ((read_slime, ["--no-such"]), (read_nemo, ["grpo.x=1"]), (read_verl, ["trainer.nnodes=2"])):
        read: Any = reader if reader is read_slime else functools.partial(reader, None)
        with pytest.warns(DeprecationWarning, match="use ignore_unsupported"):
            assert read(keys, BASE, drop_refused=True) == read(keys, BASE, ignore_unsupported=True)


def test_an_interrupted_run_says_where_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.rl.loop.run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        command(str(CONFIGS[0]), [f"run.dir={tmp_path}"])
    assert capsys.readouterr().err == "stopped at once; nothing was saved\n"
    found = SimpleNamespace(path=tmp_path / "step-00000002")
    monkeypatch.setattr("octavo.rl.checkpoint.CheckpointStore.find_latest", lambda _: found)
    with pytest.raises(KeyboardInterrupt):
        command(str(CONFIGS[0]), [f"run.dir={tmp_path}"])
    assert f"the same command goes on from {found.path}" in capsys.readouterr().err


def test_show_config_prints_and_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command(VERL[0], VERL[1:], config_format="verl", overrides=[f"run.dir={tmp_path}/run"], show_config=True)
    shown = capsys.readouterr()
    (tmp_path / "shown.toml").write_text(shown.out)
    assert load_config(RLConfig, tmp_path / "shown.toml").rollout.samples_per_prompt == 4
    assert f"{ROLLOUT}.n = 4 -> rollout.samples_per_prompt = 4" in shown.err
    assert not (tmp_path / "run").exists()
