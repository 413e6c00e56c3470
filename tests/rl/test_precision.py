"""Precision levels: one setting, the numerics that it means on both sides, and the audit of every layer."""

from pathlib import Path
from typing import Any

import pytest

from octavo.config import load_config
from octavo.errors import ConfigError, RecipeError
from octavo.nn import Linear, SparseMoE
from octavo.numerics import Numerics, get_recipe
from octavo.rl.config import RLConfig
from octavo.rl.loop import build_policy
from octavo.rl.precision import LEVELS, audit_precision
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import run

# level -> (linears of the trainer, their backward in FP8, linears of the rollout, its KV cache, its attention)
INEXACT = {
    "bf16": ("bf16", False, "bf16", "bf16", "bf16"),
    "linears": ("bf16", False, "blockwise", "bf16", "bf16"),
    "linears+kv": ("bf16", False, "blockwise", "fp8", "bf16"),
    "linears+kv+attention": ("bf16", False, "blockwise", "fp8", "fp8"),
    "end_to_end": ("blockwise", True, "blockwise", "fp8", "bf16"),
}


def facts(config: RLConfig) -> tuple[str, bool, str, str, str]:
    trainer, rollout = config.trainer_numerics, config.rollout_numerics
    linears = (trainer.recipe.name, trainer.recipe.has_fp8_backward, rollout.recipe.name)
    return *linears, rollout.kv_cache_dtype, rollout.attention_dtype


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_means_the_same_everywhere(level: str) -> None:
    assert facts(RLConfig(precision=level, exact=False)) == INEXACT[level]
    exact = RLConfig(precision=level)
    assert exact.trainer_numerics == exact.rollout_numerics
    _, backward, linears, *cache = INEXACT[level]
    assert facts(exact) == (linears, backward, linears, *cache)  # one forward; training in bf16 is its backward


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_end_to_end_takes_a_format_and_a_backward(fp8_format: str) -> None:
    config = RLConfig(precision="end_to_end", exact=False, trainer={"fp8_format": fp8_format})
    assert config.trainer_numerics.recipe == get_recipe("blockwise", fp8_format=fp8_format)
    config = RLConfig(precision="end_to_end", trainer={"recipe": "rowwise", "backward": "bf16"})
    assert facts(config)[:3] == ("rowwise", False, "rowwise")
    config = RLConfig(precision="end_to_end", rollout={"attention_dtype": "fp8"})
    assert config.trainer_numerics.attention_dtype == "fp8"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "linears", "rollout": {"kv_cache_dtype": "fp8"}}, "means rollout.kv_cache_dtype = 'bf16', got"),
        ({"precision": "linears+kv", "rollout": {"attention_dtype": "fp8"}}, "means rollout.attention_dtype = 'bf16'"),
        ({"precision": "linears", "trainer": {"recipe": "bf16"}}, "name an FP8 recipe"),
        ({"precision": "bf16", "rollout": {"recipe": "rowwise"}, "exact": False}, "leave the recipe out"),
        ({"precision": "linears", "trainer": {"backward": "fp8"}}, "use 'end_to_end'"),
        ({"precision": "linears", "rollout": {"kv_scales": "engine"}}, "scales an FP8 cache"),
        ({"precision": "everything"}, "precision"),
    ],
    ids=["kv", "attention", "trainer", "rollout", "backward", "kv_scales", "unknown"],
)
def test_a_key_that_contradicts_the_level_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RLConfig(**fields)


def test_one_setting_in_a_recipe(tmp_path: Path) -> None:
    config = tmp_path / "fp8.toml"
    config.write_text('exact = false\nprecision = "linears+kv"\n[correction]\nkind = "token_tis"\n')
    assert facts(load_config(RLConfig, config)) == INEXACT["linears+kv"]
    assert facts(load_config(RLConfig, config, ["precision=end_to_end"])) == INEXACT["end_to_end"]


@pytest.mark.parametrize("level", ["linears", "linears+kv+attention", "end_to_end"])
def test_exact_levels_have_no_mismatch(tmp_path: Path, policy: Policy, level: str) -> None:
    result = run(tiny_config(tmp_path, precision=level), model=policy[0], tokenizer=policy[1])
    assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 3
    assert all(row["actor/grad_norm"] > 0 for row in result.history)


def test_a_skipped_layer_is_named(policy: Policy) -> None:
    model = policy[0]
    model.set_numerics(Numerics(get_recipe("blockwise")))
    audit_precision(model, "sampler")
    model.set_numerics(Numerics(get_recipe("blockwise")), ignore=("layers.0.mlp.gate_up_proj",))
    with pytest.raises(RecipeError, match=r"sampler is in 'blockwise', but layers\.0\.mlp\.gate_up_proj do not run"):
        audit_precision(model, "sampler")
    model.set_numerics(Numerics())
    audit_precision(model, "trainer")
    model.layers[0].mlp.down_proj.recipe = get_recipe("rowwise")
    with pytest.raises(RecipeError, match=r"the trainer is in 'bf16', but layers\.0\.mlp\.down_proj run in FP8"):
        audit_precision(model, "trainer")


def test_a_quantized_router_is_named(tmp_path: Path) -> None:
    moe = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = tiny_config(tmp_path, model={**moe, "num_hidden_layers": 2})
    model, _ = build_policy(config, config.task.build())
    model.set_numerics(Numerics(get_recipe("blockwise")))
    audit_precision(model, "trainer")
    block = model.layers[1].mlp
    assert isinstance(block, SparseMoE)
    gate = Linear(32, 4)
    gate.recipe = get_recipe("blockwise")
    block.gate = gate  # type: ignore[assignment]
    with pytest.raises(RecipeError, match=r"the trainer's router layers\.1\.mlp\.gate is quantized \(1 in all\)"):
        audit_precision(model, "trainer")
