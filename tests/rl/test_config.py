"""The RL config: what exact mode implies and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from octavo.config import load_config
from octavo.errors import ConfigError
from octavo.rl.config import RLConfig

MOE = {"family": "qwen3_moe"}


def test_exact_mode_has_one_numerics() -> None:
    config = RLConfig()
    assert config.exact
    assert config.rollout_numerics == config.trainer_numerics
    assert config.trainer_numerics.exact
    assert config.trainer_numerics.kv_cache_dtype == "fp8"


def test_inexact_mode_has_two() -> None:
    config = RLConfig(exact=False, trainer={"recipe": "bf16"}, rollout={"recipe": "blockwise"})
    assert config.trainer_numerics.recipe.name == "bf16"
    assert config.trainer_numerics.kv_cache_dtype == "bf16"
    assert config.rollout_numerics.recipe.name == "blockwise"
    assert config.rollout_numerics.kv_cache_dtype == "fp8"
    assert not config.rollout_numerics.exact


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"recipe": "rowwise"}}, "exact = true needs one recipe on both sides"),
        ({"rollout": {"kv_cache_dtype": "bf16", "attention_dtype": "fp8"}}, "needs kv_cache_dtype='fp8', got 'bf16'"),
        ({"trainer": {"recipe": "tensorwise"}}, "exact=True needs activation scales of one token each"),
        ({"exact": False, "trainer": {"recipe": "delayed"}}, "rollout.recipe must make its scales from"),
        ({"trainer": {"recipe": "blokwise"}}, "did you mean 'blockwise'"),
        ({"trainer": {"minibatches": 7}}, "minibatches=7 must divide the 256 sequences"),
        ({"trainer": {"mini_batch_size": 7}}, "mini_batch_size=7 must divide the 32 prompts"),
        ({"trainer": {"mini_batch_size": 64}}, "mini_batch_size=64 must divide"),
        ({"trainer": {"mini_batch_size": 8, "minibatches": 4}}, "trainer.minibatches=4 .* trainer.mini_batch_size=8"),
        ({"rollout": {"samples_per_prompt": 1}}, "samples_per_prompt must be greater than or equal to 2"),
        ({"rollout": {"temperatures": 1.0}}, "did you mean rollout.temperature"),
        ({"trainer": {"lr": 1.0}}, r"did you mean trainer\.optimizer\.lr\?"),
        ({"lr": 1.0}, r"did you mean warmup\.lr or trainer\.optimizer\.lr\?"),
        ({"algorithm": {"name": "GRPO"}}, "did you mean 'grpo'"),
        ({"algorithm": {"kl_coefficient": 1.0}}, "did you mean algorithm.kl_coef"),
        ({"model": MOE}, "needs model.num_experts, a whole number >= 1, got 0"),
        ({"model": MOE | {"num_experts": 4}}, "needs model.num_experts_per_tok, a whole number"),
        ({"model": MOE | {"num_experts": 4, "num_experts_per_tok": 2}}, "needs model.moe_intermediate_size"),
        (
            {"model": MOE | {"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 32}},
            "model.num_experts_per_tok = 5 must be at most model.num_experts = 4",
        ),
        ({"correction": {"kind": "seq_tis"}}, "correction.kind must be 'none', 'token_tis', 'sequence_tis' or"),
        ({"algorithm": {"clip_c": 0.5}}, "algorithm.clip_c=0.5"),
        ({"correction": {"effect_every": 2}}, "correction.effect_every"),
    ],
)
def test_refusals(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        RLConfig(**sections)


def test_mini_batches_are_given_by_count_or_by_size_in_prompts() -> None:
    assert RLConfig().num_minibatches == 4
    assert RLConfig(trainer={"mini_batch_size": 4}).num_minibatches == 8
    assert RLConfig(trainer={"minibatches": 8}).num_minibatches == 8


def test_a_checkpoint_brings_its_own_experts() -> None:
    assert RLConfig(model={"family": "qwen3_moe", "path": "somewhere"}).model.num_experts == 0


def test_the_former_name_of_the_warm_starts_target(tmp_path: Path) -> None:
    (tmp_path / "former.toml").write_text("[warmup]\ntarget_accuracy = 0.5\nlr = 1\n")
    with pytest.warns(DeprecationWarning, match=r"warmup\.target_accuracy .* use warmup\.target_reward"):
        assert load_config(RLConfig, tmp_path / "former.toml").warmup.target_reward == 0.5
    with pytest.raises(ConfigError, match="is the former name of target_reward; give the latter alone"):
        load_config(RLConfig, tmp_path / "former.toml", ["warmup.target_reward=0.5"])
