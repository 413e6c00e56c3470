"""Megatron's flags: each one that is taken changes a result, each other is refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.integrations.config.megatron import apply_flags
from octavo.integrations.config.megatron_flags import FLAGS, ONLY_ONE, REFUSED, Flag
from octavo.nn import Linear
from octavo.train.build import build_model
from octavo.train.config import TrainConfig
from tests.conftest import RunOctavo
from tests.train.conftest import MakeConfig

AWARE = "--use-precision-aware-optimizer"
# flags -> the configuration keys that they set
EFFECTS = f"""
--fp8-format e4m3 -> precision.recipe=delayed precision.fp8_format=e4m3
--fp8-hybrid -> precision.recipe=delayed precision.fp8_format=hybrid
--fp8-e4m3 -> precision.recipe=delayed precision.fp8_format=e4m3
--fp8-hybrid --fp8-recipe blockwise -> precision.recipe=blockwise
--fp8-hybrid --fp8-margin 2 -> precision.margin=2
--fp8-hybrid --fp8-amax-history-len 16 -> precision.amax_history_len=16
--fp8-hybrid --fp8-amax-compute-algo max -> precision.amax_compute_algo=max
--fp8-hybrid --no-fp8-wgrad -> precision.high_precision_gemms=('grad_weight',)
--transformer-impl local -> precision.recipe=bf16
--first-last-layers-bf16 -> precision.num_layers_at_start_in_bf16=1 precision.num_layers_at_end_in_bf16=1
--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 -> precision.num_layers_at_start_in_bf16=2
--first-last-layers-bf16 --num-layers-at-end-in-bf16 0 -> precision.num_layers_at_end_in_bf16=0
{AWARE} --main-grads-dtype fp32 -> optimizer.state_dtype=fp32 optimizer.master_weights=fp32
{AWARE} --main-params-dtype fp32 -> optimizer.state_dtype=fp32 optimizer.master_weights=fp32
{AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 -> optimizer.state_dtype=fp8 optimizer.master_weights=fp32
--lr 0.5 --min-lr 0.125 -> schedule.min_ratio=0.25
--group-query-attention -> model.num_key_value_heads=1
--group-query-attention --num-query-groups 4 -> model.num_key_value_heads=4
--num-experts 4 --ffn-hidden-size 48 -> model.family=qwen3_moe model.num_experts=4 model.moe_intermediate_size=48
--num-experts 4 --moe-grouped-gemm -> model.num_experts_per_tok=2
--num-experts 4 --moe-router-topk 3 -> model.num_experts_per_tok=3
--num-experts 4 --moe-ffn-hidden-size 40 -> model.moe_intermediate_size=40
--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.1 -> model.router_aux_loss_coef=0.01
--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.1 -> model.router_z_loss_coef=0.1
--load runs/y --save runs/y -> run.dir=runs/y
--eval-iters 3 --global-batch-size 2 --seq-length 10 -> metrics.eval_tokens=60
--recompute-granularity selective -> run.recompute=none
--recompute-activations -> run.recompute=none
--recompute-granularity full --recompute-method uniform -> run.recompute=full run.recompute_num_layers=0
--recompute-granularity full --recompute-method block --recompute-num-layers 3 -> run.recompute_num_layers=3
""".strip().splitlines()
KINDS = {flag.name: flag.kind for flag in FLAGS}


def read_flags(line: str) -> dict[str, Any]:
    words = iter(line.split())
    return {name: True if KINDS[name] is bool else KINDS[name](next(words)) for name in words}


def get(config: TrainConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


TRIED = {name for row in EFFECTS for name in read_flags(row.partition(" -> ")[0])}


def test_every_flag_is_listed() -> None:
    assert {flag.name for flag in FLAGS if not flag.key} <= TRIED
    assert not {flag.name for flag in FLAGS} & {*REFUSED, *ONLY_ONE}


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.key and flag.name not in TRIED], ids=lambda f: f.name)
def test_a_flag_with_a_key_sets_it(flag: Flag) -> None:
    """To a value of the flag's kind that is not the key's before."""
    before = TrainConfig(precision={"recipe": "bf16", "dtype": "fp32"} if flag.name == "--bf16" else {})
    value = flag.value if flag.kind is bool else {int: 512, float: 0.0625, str: "x"}[flag.kind]
    value = next((choice for choice in flag.choices if choice != get(before, flag.key)), value)
    fitting = "--hidden-size 1024 --global-batch-size 512 --train-iters 1024 --tensor-model-parallel-size 2"
    needs = {"--num-attention-heads", "--micro-batch-size", "--lr-warmup-iters", "--sequence-parallel"}
    given = read_flags(fitting if flag.name in needs else "") | {flag.name: True if flag.kind is bool else value}
    after, notes = apply_flags(before, given)
    assert str(get(after, flag.key)) == str(value) != str(get(before, flag.key))
    assert f"{flag.key} = {value!r}" in notes


@pytest.mark.parametrize("row", EFFECTS)
def test_flag_changes_the_configuration(row: str) -> None:
    flags, _, keys = row.partition(" -> ")
    after, notes = apply_flags(TrainConfig(), read_flags(flags))
    for key, _, value in (pair.partition("=") for pair in keys.split()):
        assert str(get(after, key)) == value
        assert any(note.startswith(f"{key} = ") for note in notes)


@pytest.mark.parametrize("flag", [*REFUSED, *ONLY_ONE])
def test_other_flags_are_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} .*refused: .{{10}}"):
        apply_flags(TrainConfig(), {flag: 2})


@pytest.mark.parametrize("flag", ONLY_ONE)
def test_one_is_what_octavo_does(flag: str) -> None:
    assert apply_flags(TrainConfig(), {flag: 1})[0] == TrainConfig()


def test_megatrons_defaults_come_with_fp8_format() -> None:
    before = TrainConfig(precision={"recipe": "delayed", "amax_history_len": 64, "margin": 1, "backward": "bf16"})
    after = apply_flags(before, read_flags("--fp8-hybrid"))[0].precision
    assert (after.margin, after.amax_history_len, after.amax_compute_algo) == (0, 1, "most_recent")
    assert after.backward == "bf16"
    assert after.make_recipe().delayed is not None


def test_another_recipe_takes_delayed_scalings_fields_away() -> None:
    before = TrainConfig(precision={"recipe": "delayed", "amax_history_len": 64, "margin": 1})
    after = apply_flags(before, read_flags("--fp8-e4m3 --fp8-recipe rowwise"))[0].precision
    assert (after.recipe, after.amax_history_len, after.margin) == ("rowwise", None, None)


def test_local_takes_every_trace_of_fp8_away() -> None:
    before = TrainConfig(precision={"recipe": "delayed", "margin": 1, "modules": {"down_proj": "rowwise"}})
    after = apply_flags(before, {"--transformer-impl": "local"})[0].precision
    assert (after.recipe, after.margin, after.modules) == ("bf16", None, {})


FULL = "--recompute-granularity full"
BAD = [
    ("--fp8-recipe blockwise", "--fp8-recipe has no effect without --fp8-format"),
    ("--fp8-margin 1", "--fp8-margin has no effect without --fp8-format"),
    ("--no-fp8-wgrad", "--no-fp8-wgrad has no effect without --fp8-format"),
    ("--moe-router-topk 2", "--moe-router-topk has no effect without --num-experts"),
    ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff has no effect without --num-experts"),
    ("--num-experts 1", "--moe-router-topk 2 must be at most --num-experts 1"),
    ("--fp8-format hybrid --fp8-e4m3", "--fp8-format and --fp8-e4m3 name two formats"),
    ("--fp8-hybrid --fp8-recipe rowwise --fp8-margin 1", "--fp8-margin has no effect with --fp8-recipe rowwise"),
    ("--fp8-hybrid --transformer-impl local", "--transformer-impl local has no FP8"),
    ("--fp8-hybrid --first-last-layers-bf16", "does not go with delayed scaling"),
    ("--transformer-impl local --first-last-layers-bf16", "has no effect without FP8"),
    ("--num-layers-at-end-in-bf16 1", "has no effect without --first-last-layers-bf16"),
    ("--exp-avg-dtype fp8", "has no effect without --use-precision-aware-optimizer"),
    (f"{AWARE} --exp-avg-dtype fp8", "must be the same here, got fp32, fp8"),
    (f"{AWARE} --main-grads-dtype bf16", "--main-grads-dtype bf16 is refused"),
    (f"{AWARE} --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16", "fp16 is refused"),
    ("--min-lr 1.0", "--min-lr 1.0 must be from 0 to the peak"),
    ("--load a --save b", "must be one directory"),
    ("--pretrained-checkpoint a --hidden-size 9", "--hidden-size has no effect on the checkpoint a"),
    (FULL, "needs --recompute-method"),
    (f"{FULL} --recompute-method uniform --recompute-num-layers 2", "refused with uniform"),
    ("--recompute-num-layers 2", "has no effect without --recompute-granularity full"),
    ("--train-iters 10", "warm-up of 20 steps .* of 10: give --lr-warmup-iters below --train-iters"),
    ("--lr-warmup-iters 200", "warm-up of 200 steps .* of 200"),
    ("--hidden-size 0", "model.hidden_size must be greater than 0"),
]


@pytest.mark.parametrize(("flags", "message"), BAD)
def test_what_makes_no_sense_is_an_error(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_flags(TrainConfig(), read_flags(flags))


def test_layers_and_wgrad_reach_the_linears(make_config: MakeConfig) -> None:
    given = "--fp8-hybrid --fp8-recipe blockwise --no-fp8-wgrad --first-last-layers-bf16 --num-layers-at-end-in-bf16 0"
    model = build_model(apply_flags(make_config(), read_flags(given))[0], 280, 0, torch.device("cpu"))
    recipes = {name: module.recipe for name, module in model.named_modules() if isinstance(module, Linear)}
    assert all(recipe is None for name, recipe in recipes.items() if name.startswith("layers.0."))
    for name, recipe in recipes.items():
        if name.startswith("layers.1."):
            assert recipe is not None
            assert (recipe.in_fp8("grad_input"), recipe.in_fp8("grad_weight")) == (True, False)


def test_command_takes_flags_over_file_and_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[run]\nsteps = 50\n")
    seen: list[TrainConfig] = []
    monkeypatch.setattr(
        "octavo.cli.train.train", lambda config, resume: seen.append(config) or SimpleNamespace(stopped_by=None)
    )
    monkeypatch.setattr("octavo.cli.train.print_result", lambda *_: None)
    flags = ["--train-iters", "70", "--fp8-format=hybrid", "--fp8-margin", "0", "--bf16", "--clip-grad", "0"]
    said = run_octavo("train", config, "--set", "run.steps=60", *flags, "--tensor-model-parallel-size", "2").err
    assert (seen[0].run.steps, seen[0].precision.recipe, seen[0].precision.amax_history_len) == (70, "delayed", 1)
    assert seen[0].optimizer.max_grad_norm == 0.0
    assert seen[0].parallel.tensor_parallel_degree == 2
    assert "precision.recipe = 'delayed'" in said and "precision.amax_history_len = 1" in said
    assert run_octavo("train", config).code == 0
    assert (seen[1].run.steps, seen[1].precision.recipe) == (50, "blockwise")


def test_command_refuses(tmp_path: Path, run_octavo: RunOctavo) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")
    for flags, named in (
        ("--fp8-recipe blockwise", "--fp8-recipe has no effect"),
        ("--fp8-param-gather", "--fp8-param-gather is refused"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2 is refused"),
        ("--sequence-parallel", "sequence_parallel cuts tokens among the ranks that cut each linear"),
        ("--fp8-format e5m2", "hybrid"),
    ):
        ended = run_octavo("train", config, *flags.split())
        assert ended.code == 2 and named in ended.err
    config.write_text("exact = true\n[task]\nname = 'arithmetic'\n[rollout]\n")
    ended = run_octavo("train", config)
    assert ended.code == 2 and f"run: octavo rl {config}" in ended.err


def test_help_shows_the_flags(monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run_octavo("train", "--help").out
    assert "--fp8-amax-compute-algo" in shown and "--fp8-param-gather" not in shown
