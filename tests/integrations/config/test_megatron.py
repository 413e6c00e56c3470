"""Megatron's flags: each one that is taken changes a result, each other is refused by name."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import cli
from octavo.errors import ConfigError
from octavo.integrations.config.megatron import apply_flags
from octavo.integrations.config.megatron_flags import FLAGS, ONLY_ONE, REFUSED, Flag
from octavo.models import Decoder
from octavo.nn import Linear
from octavo.train import train
from octavo.train.build import build_model
from octavo.train.config import TrainConfig
from tests.train.conftest import MakeConfig

HYBRID = {"--fp8-format": "hybrid"}
EXPERTS = {"--num-experts": 4}
AWARE = {"--use-precision-aware-optimizer": True}
FULL = {"--recompute-granularity": "full"}
# flag that means something with others -> (flags, configuration keys that they set, from a file with those of FILE)
FILE = {"precision": {"recipe": "bf16"}, "run": {"steps": 50, "recompute": "full"}}
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--fp8-format": ({"--fp8-format": "e4m3"}, {"precision.recipe": "delayed", "precision.fp8_format": "e4m3"}),
    "--fp8-hybrid": ({"--fp8-hybrid": True}, {"precision.recipe": "delayed", "precision.fp8_format": "hybrid"}),
    "--fp8-e4m3": ({"--fp8-e4m3": True}, {"precision.recipe": "delayed", "precision.fp8_format": "e4m3"}),
    "--fp8-recipe": (HYBRID | {"--fp8-recipe": "blockwise"}, {"precision.recipe": "blockwise"}),
    "--fp8-margin": (HYBRID | {"--fp8-margin": 2}, {"precision.margin": 2}),
    "--fp8-amax-history-len": (HYBRID | {"--fp8-amax-history-len": 16}, {"precision.amax_history_len": 16}),
    "--fp8-amax-compute-algo": (HYBRID | {"--fp8-amax-compute-algo": "max"}, {"precision.amax_compute_algo": "max"}),
    "--no-fp8-wgrad": (HYBRID | {"--no-fp8-wgrad": True}, {"precision.high_precision_gemms": ("grad_weight",)}),
    "--transformer-impl": ({"--transformer-impl": "local"}, {"precision.recipe": "bf16"}),
    "--first-last-layers-bf16": (
        HYBRID | {"--fp8-recipe": "blockwise", "--first-last-layers-bf16": True},
        {"precision.num_layers_at_start_in_bf16": 1, "precision.num_layers_at_end_in_bf16": 1},
    ),
    "--num-layers-at-start-in-bf16": (
        HYBRID | {"--fp8-recipe": "rowwise", "--first-last-layers-bf16": True, "--num-layers-at-start-in-bf16": 2},
        {"precision.num_layers_at_start_in_bf16": 2, "precision.num_layers_at_end_in_bf16": 1},
    ),
    "--num-layers-at-end-in-bf16": (
        HYBRID | {"--fp8-recipe": "rowwise", "--first-last-layers-bf16": True, "--num-layers-at-end-in-bf16": 0},
        {"precision.num_layers_at_start_in_bf16": 1, "precision.num_layers_at_end_in_bf16": 0},
    ),
    "--bf16": ({"--bf16": True}, {"precision.dtype": "bf16"}),
    "--use-precision-aware-optimizer": (AWARE, {"optimizer.state_dtype": "fp32", "optimizer.master_weights": "fp32"}),
    "--main-grads-dtype": (AWARE | {"--main-grads-dtype": "fp32"}, {"optimizer.master_weights": "fp32"}),
    "--main-params-dtype": (AWARE | {"--main-params-dtype": "fp32"}, {"optimizer.master_weights": "fp32"}),
    "--exp-avg-dtype": (
        AWARE | {"--exp-avg-dtype": "fp8", "--exp-avg-sq-dtype": "fp8"},
        {"optimizer.state_dtype": "fp8"},
    ),
    "--exp-avg-sq-dtype": (
        AWARE | {"--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16"},
        {"optimizer.state_dtype": "bf16"},
    ),
    "--min-lr": ({"--lr": 0.5, "--min-lr": 0.125}, {"schedule.min_ratio": 0.25}),
    "--group-query-attention": ({"--group-query-attention": True}, {"model.num_key_value_heads": 1}),
    "--num-query-groups": (
        {"--group-query-attention": True, "--num-query-groups": 4},
        {"model.num_key_value_heads": 4},
    ),
    "--num-experts": (
        EXPERTS,
        {
            "model.family": "qwen3_moe",
            "model.num_experts": 4,
            "model.num_experts_per_tok": 2,
            "model.moe_intermediate_size": 384,
        },
    ),
    "--moe-router-topk": (EXPERTS | {"--moe-router-topk": 3}, {"model.num_experts_per_tok": 3}),
    "--moe-ffn-hidden-size": (EXPERTS | {"--moe-ffn-hidden-size": 40}, {"model.moe_intermediate_size": 40}),
    "--moe-aux-loss-coeff": (EXPERTS | {"--moe-aux-loss-coeff": 0.01}, {"model.router_aux_loss_coef": 0.01}),
    "--moe-z-loss-coeff": (EXPERTS | {"--moe-z-loss-coeff": 0.001}, {"model.router_z_loss_coef": 0.001}),
    "--moe-grouped-gemm": (EXPERTS | {"--moe-grouped-gemm": True}, {"model.family": "qwen3_moe"}),
    "--load": ({"--load": "runs/y", "--save": "runs/y"}, {"run.dir": Path("runs/y")}),
    "--eval-iters": (
        {"--eval-iters": 3, "--global-batch-size": 2, "--seq-length": 10},
        {"metrics.eval_tokens": 60},
    ),
    "--recompute-granularity": ({"--recompute-granularity": "selective"}, {"run.recompute": "none"}),
    "--recompute-activations": ({"--recompute-activations": True}, {"run.recompute": "none"}),
    "--recompute-method": (FULL | {"--recompute-method": "uniform"}, {"run.recompute": "full"}),
    "--recompute-num-layers": (
        FULL | {"--recompute-method": "block", "--recompute-num-layers": 3},
        {"run.recompute": "full", "run.recompute_num_layers": 3},
    ),
}
# what the file must say for the flag to change it
OTHER = {
    "--transformer-impl": {"precision": {"recipe": "blockwise", "fp8_format": "hybrid"}},
    "--bf16": {"precision": {"recipe": "bf16", "dtype": "fp32"}},
    "--recompute-method": {"run": {"steps": 50}},
    "--use-precision-aware-optimizer": {"optimizer": {"state_dtype": "fp8", "master_weights": "remainder"}},
    "--main-grads-dtype": {"optimizer": {"master_weights": "remainder"}},
    "--main-params-dtype": {"optimizer": {"master_weights": "remainder"}},
    "--group-query-attention": {"model": {"num_key_value_heads": 2}},
}


def get(config: TrainConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def test_every_flag_is_listed() -> None:
    assert set(EFFECTS) >= {flag.name for flag in FLAGS if not flag.key}
    assert not {flag.name for flag in FLAGS} & {*REFUSED, *ONLY_ONE}


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.key and flag.name not in EFFECTS], ids=lambda f: f.name
)
def test_a_flag_with_a_key_sets_it(flag: Flag) -> None:
    """To a value of the flag's kind that is not the key's before."""
    before = TrainConfig()
    value = flag.value if flag.kind is bool else {int: 512, float: 0.0625, str: "x"}[flag.kind]
    value = next((choice for choice in flag.choices if choice != get(before, flag.key)), value)
    given = {flag.name: True if flag.kind is bool else value}
    fitting = {"--hidden-size": 1024, "--global-batch-size": 512, "--train-iters": 1024}
    needs = {"--num-attention-heads", "--micro-batch-size", "--lr-warmup-iters"}
    after, notes = apply_flags(before, given | (fitting if flag.name in needs else {}))
    assert str(get(after, flag.key)) == str(value) != str(get(before, flag.key))
    assert f"{flag.key} = {value!r}" in notes


@pytest.mark.parametrize("flag", EFFECTS)
def test_flag_changes_the_configuration(flag: str) -> None:
    given, expected = EFFECTS[flag]
    before = TrainConfig(**(FILE | OTHER.get(flag, {})))
    after, notes = apply_flags(before, given)
    assert {key: get(after, key) for key in expected} == expected
    assert {key: get(before, key) for key in expected} != {key: get(after, key) for key in expected}
    assert any(note.startswith(f"{key} = ") for key in expected for note in notes)


@pytest.mark.parametrize("flag", [*REFUSED, *ONLY_ONE])
def test_other_flags_are_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} .*refused: .{{10}}"):
        apply_flags(TrainConfig(), {flag: 2})


@pytest.mark.parametrize("flag", ONLY_ONE)
def test_one_is_what_octavo_does(flag: str) -> None:
    assert apply_flags(TrainConfig(), {flag: 1})[0] == TrainConfig()


def test_megatrons_defaults_come_with_fp8_format() -> None:
    before = TrainConfig(precision={"recipe": "delayed", "amax_history_len": 64, "margin": 1, "backward": "bf16"})
    after = apply_flags(before, HYBRID)[0].precision
    assert (after.margin, after.amax_history_len, after.amax_compute_algo) == (0, 1, "most_recent")
    assert after.backward == "bf16"
    assert after.make_recipe().delayed is not None


def test_another_recipe_takes_delayed_scalings_fields_away() -> None:
    before = TrainConfig(precision={"recipe": "delayed", "amax_history_len": 64, "margin": 1})
    after = apply_flags(before, {"--fp8-format": "e4m3", "--fp8-recipe": "rowwise"})[0].precision
    assert (after.recipe, after.amax_history_len, after.margin) == ("rowwise", None, None)


def test_local_takes_every_trace_of_fp8_away() -> None:
    before = TrainConfig(precision={"recipe": "delayed", "margin": 1, "modules": {"down_proj": "rowwise"}})
    after = apply_flags(before, {"--transformer-impl": "local"})[0].precision
    assert (after.recipe, after.margin, after.modules) == ("bf16", None, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"--fp8-recipe": "blockwise"}, "--fp8-recipe has no effect without --fp8-format: Megatron trains without FP8"),
        ({"--fp8-margin": 1}, "--fp8-margin has no effect without --fp8-format"),
        ({"--no-fp8-wgrad": True}, "--no-fp8-wgrad has no effect without --fp8-format"),
        ({"--moe-router-topk": 2}, "--moe-router-topk has no effect without --num-experts"),
        ({"--moe-aux-loss-coeff": 0.1}, "--moe-aux-loss-coeff has no effect without --num-experts"),
        ({"--num-experts": 1}, "--moe-router-topk 2 must be at most --num-experts 1"),
        (HYBRID | {"--fp8-e4m3": True}, "--fp8-format and --fp8-e4m3 name two formats"),
        (
            HYBRID | {"--fp8-recipe": "rowwise", "--fp8-margin": 1},
            "--fp8-margin has no effect with --fp8-recipe rowwise",
        ),
        (HYBRID | {"--transformer-impl": "local"}, "--transformer-impl local has no FP8"),
        (HYBRID | {"--first-last-layers-bf16": True}, "does not go with delayed scaling"),
        ({"--num-layers-at-end-in-bf16": 1}, "has no effect without --first-last-layers-bf16"),
        ({"--exp-avg-dtype": "fp8"}, "has no effect without --use-precision-aware-optimizer"),
        (AWARE | {"--exp-avg-dtype": "fp8"}, "must be the same here, got fp32, fp8"),
        (AWARE | {"--main-grads-dtype": "bf16"}, "--main-grads-dtype bf16 is refused"),
        (AWARE | {"--exp-avg-dtype": "fp16", "--exp-avg-sq-dtype": "fp16"}, "fp16 is refused"),
        ({"--min-lr": 1.0}, "--min-lr 1.0 must be from 0 to the peak"),
        ({"--load": "a", "--save": "b"}, "must be one directory"),
        ({"--pretrained-checkpoint": "a", "--hidden-size": 9}, "--hidden-size has no effect on the checkpoint a"),
        (FULL, "needs --recompute-method"),
        (FULL | {"--recompute-method": "uniform", "--recompute-num-layers": 2}, "refused with uniform"),
        ({"--recompute-num-layers": 2}, "has no effect without --recompute-granularity full"),
        ({"--train-iters": 10}, "warm-up of 20 steps .* of 10: give --lr-warmup-iters below --train-iters, or raise"),
        ({"--lr-warmup-iters": 200}, "warm-up of 200 steps .* of 200: give --lr-warmup-iters below --train-iters"),
        ({"--train-iters": 0}, "run.steps must be greater than 0"),
        ({"--hidden-size": 0}, "model.hidden_size must be greater than 0"),
        ({"--global-batch-size": 3, "--micro-batch-size": 2}, "batch_size=3 must be a multiple of micro_batch_size=2"),
    ],
)
def test_what_makes_no_sense_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_flags(TrainConfig(), given)


def test_layers_without_fp8_have_nothing_to_leave_out() -> None:
    with pytest.raises(ConfigError, match="has no effect without FP8"):
        apply_flags(TrainConfig(precision={"recipe": "bf16"}), {"--first-last-layers-bf16": True})


# Numerics: flags that change what is computed


def codes_and_loss(config: TrainConfig) -> tuple[dict[str, str], list[float]]:
    result = train(config, progress=False)
    assert isinstance(result.model, Decoder)
    linears = {
        n: m.recipe.name if m.recipe else "bf16" for n, m in result.model.named_modules() if isinstance(m, Linear)
    }
    return linears, [row.loss for row in result.rows]


# one for each group of flags; what each sets stands in EFFECTS
NUMERICS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "format": (
        {"--fp8-format": "hybrid", "--fp8-recipe": "rowwise"},
        {"--fp8-format": "e4m3", "--fp8-recipe": "rowwise"},
    ),
    "recipe": (HYBRID | {"--fp8-recipe": "mxfp8"}, HYBRID | {"--fp8-recipe": "blockwise"}),
    "delayed scaling": (
        HYBRID | {"--fp8-amax-history-len": 8},
        HYBRID | {"--fp8-amax-history-len": 8, "--fp8-amax-compute-algo": "max", "--fp8-margin": 6},
    ),
    "gradients": (
        HYBRID | {"--fp8-recipe": "blockwise"},
        HYBRID | {"--fp8-recipe": "blockwise", "--no-fp8-wgrad": True},
    ),
    "layers": (
        HYBRID | {"--fp8-recipe": "rowwise"},
        HYBRID | {"--fp8-recipe": "rowwise", "--first-last-layers-bf16": True, "--num-layers-at-end-in-bf16": 0},
    ),
    "optimizer": (AWARE, AWARE | {"--exp-avg-dtype": "fp8", "--exp-avg-sq-dtype": "fp8"}),
}


@pytest.mark.parametrize("group", NUMERICS)
def test_flags_change_the_loss(make_config: MakeConfig, group: str) -> None:
    base = make_config(
        run={"steps": 3}, metrics={"eval_every": 0}, optimizer={"lr": 1e-2}, schedule={"warmup_steps": 1}
    )
    losses = []
    for i, given in enumerate(NUMERICS[group]):
        config = apply_flags(base, given | {"--save": str(base.run.dir / str(i))})[0]
        losses.append(codes_and_loss(config)[1])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)


def test_layers_and_wgrad_reach_the_linears(make_config: MakeConfig) -> None:
    given = HYBRID | {"--fp8-recipe": "blockwise", "--no-fp8-wgrad": True, "--first-last-layers-bf16": True}
    config = apply_flags(make_config(), given | {"--num-layers-at-end-in-bf16": 0})[0]
    model = build_model(config, 280, 0, torch.device("cpu"))
    recipes = {name: module.recipe for name, module in model.named_modules() if isinstance(module, Linear)}
    assert all(recipe is None for name, recipe in recipes.items() if name.startswith("layers.0."))
    for name, recipe in recipes.items():
        if name.startswith("layers.1."):
            assert recipe is not None
            assert (recipe.in_fp8("grad_input"), recipe.in_fp8("grad_weight")) == (True, False)


def test_experts_are_built(make_config: MakeConfig) -> None:
    config = apply_flags(make_config(), EXPERTS | {"--ffn-hidden-size": 48, "--moe-grouped-gemm": True})[0]
    model = build_model(config, 280, 0, torch.device("cpu"))
    assert (model.config.num_experts, model.config.num_experts_per_tok, model.config.moe_intermediate_size) == (
        4,
        2,
        48,
    )


# The command


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["octavo", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_command_takes_flags_over_file_and_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[run]\nsteps = 50\n")
    seen: list[TrainConfig] = []

    def fake(config: TrainConfig, resume: bool) -> SimpleNamespace:
        seen.append(config)
        return SimpleNamespace(stopped_by=None)

    monkeypatch.setattr("octavo.cli.train.train", fake)
    monkeypatch.setattr("octavo.cli.train.print_result", lambda result: None)
    flags = ["--train-iters", "70", "--fp8-format=hybrid", "--fp8-margin", "0", "--bf16", "--clip-grad", "0"]
    assert run(monkeypatch, config, "--set", "run.steps=60", *flags, "--tensor-model-parallel-size", "1") == 0
    assert (seen[0].run.steps, seen[0].precision.recipe, seen[0].precision.amax_history_len) == (70, "delayed", 1)
    assert seen[0].optimizer.max_grad_norm == 0.0
    said = capsys.readouterr().err
    assert "precision.recipe = 'delayed'" in said
    assert "precision.amax_history_len = 1" in said
    assert run(monkeypatch, config) == 0
    assert (seen[1].run.steps, seen[1].precision.recipe) == (50, "blockwise")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fp8-recipe", "blockwise"], "error: --fp8-recipe has no effect without --fp8-format"),
        (["--fp8-param-gather"], "error: --fp8-param-gather is refused"),
        (["--tensor-model-parallel-size", "2"], "error: --tensor-model-parallel-size 2 is refused"),
        (["--fp8-interval", "2"], "error: --fp8-interval 2 is refused"),
        (["--fp16"], "error: --fp16 is refused"),
        (["--fp8-format", "e5m2"], "hybrid"),
    ],
)
def test_command_refuses(
    tmp_path: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")
    assert run(monkeypatch, config, *flags) == 2
    assert message in capsys.readouterr().err


def test_help_shows_the_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    assert "--fp8-amax-compute-algo" in said
    assert "--fp8-param-gather" not in said


def test_reinforcement_recipe_is_sent_to_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "rl.toml"
    config.write_text("exact = true\n[task]\nname = 'arithmetic'\n[rollout]\n")
    assert run(monkeypatch, config) == 2
    assert f"run: octavo rl {config}" in capsys.readouterr().err
