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


def read(framework: str, keys: str) -> tuple[RLConfig, list[str]]:
    return read_slime(keys.split(), BASE) if framework == "slime" else read_nemo(None, keys.split(), BASE)


@pytest.mark.parametrize(
    ("framework", "keys", "key", "expected"),
    [
        ("NeMo-RL", f"{VLLM}.precision=fp8", "rollout.recipe", "blockwise"),
        ("NeMo-RL", f"{VLLM}.precision=bfloat16", "exact", True),
        ("NeMo-RL", f"{VLLM}.precision=fp8 {VLLM}.is_mx=true", "rollout.recipe", "mxfp8"),
        ("NeMo-RL", f"{VLLM}.kv_cache_dtype=auto", "rollout.kv_cache_dtype", "bf16"),
        ("NeMo-RL", f"{FP8}.enabled=true {FP8}.fp8_recipe=blockwise", "trainer.recipe", "blockwise"),
        ("NeMo-RL", f"{FP8}.enabled=true {FP8}.fp8=e4m3", "trainer.fp8_format", "e4m3"),
        ("NeMo-RL", f"{FP8}.enabled=true {FP8}.fp8_recipe=blockwise {VLLM}.precision=fp8", "exact", True),
        ("NeMo-RL", f"{USE} {TIS}_ratio=3", "correction.kind", "token_tis"),
        ("NeMo-RL", f"{USE} {TIS}_ratio=3", "correction.cap", 3.0),
        ("NeMo-RL", f"{USE} {TIS}_type=icepop {TIS}_ratio=5 {TIS}_ratio_min=0.4", "correction.kind", "icepop"),
        ("NeMo-RL", f"{USE} {TIS}_type=icepop {TIS}_ratio=5 {TIS}_ratio_min=0.4", "correction.low", 0.4),
        ("slime", "--bf16 --fp8-format e4m3", "trainer.fp8_format", "e4m3"),
        ("slime", "--fp8-format e4m3 --fp8-recipe blockwise", "trainer.recipe", "blockwise"),
        ("slime", "--use-tis", "correction.kind", "token_tis"),
        ("slime", "--use-tis --tis-clip=3 --tis-clip-low 0", "correction.cap", 3.0),
        ("slime", "--sglang-kv-cache-dtype bf16", "rollout.kv_cache_dtype", "bf16"),
        ("slime", "--use-rollout-routing-replay", "router_replay", True),
    ],
)
def test_other_frameworks_names(framework: str, keys: str, key: str, expected: Any) -> None:
    config, notes = read(framework, keys)
    assert value_of(config, key) == expected != value_of(BASE, key)
    assert any(f" -> {key} = " in note for note in notes)


@pytest.mark.parametrize(
    ("framework", "keys", "message"),
    [
        ("NeMo-RL", f"{VLLM}.precision=int8", "octavo has bfloat16 or fp8"),
        ("NeMo-RL", f"{VLLM}.is_mx=true", "it has no effect without"),
        ("NeMo-RL", f"{VLLM}.num_last_layers_in_bf16=2", "octavo quantizes every linear"),
        ("NeMo-RL", f"{VLLM}.quantization_ignored_layer_kws=[gate]", "octavo quantizes every linear"),
        ("NeMo-RL", f"{VLLM}.pow2_weight_scaling_factors=true", "octavo's scales are fp32"),
        ("NeMo-RL", f"{VLLM}.precision=bfloat16 {VLLM}.kv_cache_dtype=fp8", "FP8 cache with .*=fp8 alone"),
        ("NeMo-RL", f"{FP8}.fp8_param=true", "FP8 codes are derived from them"),
        ("NeMo-RL", f"{FP8}.fp8=hybrid", "it has no effect without"),
        ("NeMo-RL", f"{TIS}_ratio=3", "it has no effect without"),
        ("NeMo-RL", USE, "give loss_fn.truncated_importance_sampling_ratio"),
        ("NeMo-RL", f"{USE} {TIS}_ratio=3 {TIS}_ratio_min=0.5", "have no lower bound; give type icepop"),
        ("NeMo-RL", f"{USE} {TIS}_type=seq-mask-tis {TIS}_ratio=3", "octavo has tis or icepop"),
        ("NeMo-RL", "grpo.num_prompts_per_step=4", r"octavo's \[rollout\]"),
        ("NeMo-RL", "policy.generation.temperature=0.5", "FP8 and correction keys alone"),
        ("slime", "--fp8-recipe blockwise", "it has no effect without --fp8-format"),
        ("slime", "--fp8-param-gather", "one GPU gathers no parameters"),
        ("slime", "--use-routing-replay", "give --use-rollout-routing-replay"),
        ("slime", "--tis-clip 3", "it has no effect without --use-tis"),
        ("slime", "--use-tis --tis-clip-low 0.5", "have no lower bound"),
        ("slime", "--sglang-mem-fraction-static 0.7", r"octavo's \[rollout\]"),
        ("slime", "--sglang-kv-cache-dtype fp8_e5m2", "octavo has auto or"),
        ("slime", "--rollout-batch-size 32", "slime's FP8 and correction flags alone"),
    ],
)
def test_other_frameworks_other_names_are_refused(framework: str, keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{framework}'s .* is refused: .*{message}"):
        read(framework, keys)


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


def test_slimes_routes_need_no_replay_in_exact_mode() -> None:
    config, notes = read_slime(["--use-rollout-routing-replay"], RLConfig())
    assert config == RLConfig()
    assert "without a replay" in notes[0]


def test_set_is_read_before_the_framework_s_keys() -> None:
    with pytest.raises(ConfigError, match=r"task.verifier has no effect .*--set is read before verl's keys"):
        resolve_config([*VERL, "data.train_files=a.jsonl"], "verl", ["task.verifier=exact"])


FILES = {"name": "questions", "path": ["a.jsonl", "b.jsonl"]}
OPTIONS = {"n": 3, "deep": {"x y": [1, 2.5, "\"\\\n'"]}}
PRINTED = [
    *(load_config(RLConfig, path) for path in CONFIGS),
    RLConfig(precision="end_to_end"),
    RLConfig(precision="bf16"),
    RLConfig(trainer={"mini_batch_size": 8}),
    RLConfig(precision="linears", trainer={"recipe": "rowwise"}),
    RLConfig(task={"name": "callable", "function": "a:b", "options": OPTIONS}),
    RLConfig(task={"name": "questions", "path": "a\tb.jsonl", "end": "\n"}),
    RLConfig(task=FILES, trainer={"epochs": 2}),
    RLConfig(task=FILES, trainer={"epochs": 2, "steps": 120}),
]


@pytest.mark.parametrize("config", PRINTED)
def test_the_printed_recipe_is_the_recipe(config: RLConfig, tmp_path: Path) -> None:
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    again = load_config(RLConfig, tmp_path / "again.toml")
    assert again.model_dump() == config.model_dump()
    assert again.trainer_numerics == config.trainer_numerics
    assert again.trainer.epochs is None or ("steps" in again.trainer.model_fields_set) == (
        "steps" in config.trainer.model_fields_set
    )


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
        (["3"], "slime", None, "begin with a flag"),
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
