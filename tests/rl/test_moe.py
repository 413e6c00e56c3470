"""Reinforcement of a mixture of experts: exact in every batch shape, experts without tokens, router losses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn.router_watch import sparse_blocks
from octavo.rl.config import RLConfig
from octavo.rl.learner import Learner
from octavo.rl.loop import build_policy
from octavo.rl.router_replay import PolicyRouters
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import EASY, run, weights_of


def moe_config(directory: Path, num_experts: int = 8, model: dict[str, Any] | None = None, **sections: Any) -> RLConfig:
    """tiny_config with two layers of experts."""
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    fields = {"family": "qwen3_moe", "num_hidden_layers": 2, **experts, **(model or {})}
    dense = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_config(directory, model={**dense, **fields}, **sections)


def moe_policy(config: RLConfig) -> Policy:
    return build_policy(config, EASY)


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        ({"recipe": "blockwise", "steps": 2}, {}),
        ({"recipe": "blockwise", "steps": 1, "micro_batch_sequences": 3}, {"max_num_seqs": 3}),
        ({"recipe": "rowwise", "backward": "bf16", "steps": 2, "minibatches": 2}, {"max_num_seqs": 5}),
        ({"recipe": "bf16", "steps": 2, "micro_batch_sequences": 1}, {"kv_cache_dtype": "bf16"}),
    ],
    ids=["all at once", "few rows", "minibatches", "one by one"],
)
def test_exact_with_experts(tmp_path: Path, trainer: dict[str, Any], rollout: dict[str, Any]) -> None:
    """32 experts and few tokens: in every step some expert has none."""
    few = {"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 4}
    config = moe_config(tmp_path, num_experts=32, trainer=trainer, rollout=few | rollout)
    model, tokenizer = moe_policy(config)
    before = weights_of(model)
    result = run(config, model=model, tokenizer=tokenizer)
    assert len(result.history) == trainer["steps"]
    for row in result.history:
        assert row["mismatch/logprob_abs_diff_max"] == 0.0
        assert row["mismatch/tokens_differing_share"] == 0.0
        assert row["actor/grad_norm"] > 0.0
        assert row["router/idle_experts_share"] > 0.0
        assert row["router/dropped_share"] == 0.0
        assert row["router/load_max_over_mean"] > 1.0
    for name, param in model.named_parameters():
        if "mlp" in name and param.dim() == 2:
            assert not torch.equal(before[name], param), name


def test_router_losses_even_the_load_out(tmp_path: Path) -> None:
    """The same rollouts' first step, with and without the losses: another update, and only where they say so."""
    found = {}
    for name, model_section in {
        "off": {},
        "none": {"router_aux_loss_coef": 0.0},
        "aux": {"router_aux_loss_coef": 5.0},
        "z": {"router_z_loss_coef": 5.0},
    }.items():
        config = moe_config(tmp_path, model=model_section, trainer={"steps": 1, "recipe": "bf16"})
        model, tokenizer = moe_policy(config)
        result = run(config, model=model, tokenizer=tokenizer)
        found[name] = (weights_of(model), result.history[0])
    assert all(torch.equal(found["off"][0][name], found["none"][0][name]) for name in found["off"][0])
    for name in ("aux", "z"):
        weights, row = found[name]
        assert not torch.equal(weights["layers.0.mlp.gate.weight"], found["off"][0]["layers.0.mlp.gate.weight"])
        assert row["actor/pg_loss"] == found["off"][1]["actor/pg_loss"]  # reported without them
        assert row["actor/grad_norm"] > found["off"][1]["actor/grad_norm"]
        assert row["router/aux_loss"] == found["off"][1]["router/aux_loss"] > 1.0


def test_micro_batches_share_the_router_losses(tmp_path: Path) -> None:
    config = moe_config(
        tmp_path,
        model={"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.25},
        trainer={"steps": 1, "micro_batch_sequences": 3},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 4},
    )
    model, tokenizer = moe_policy(config)
    seen: list[tuple[float, float]] = []
    block = sparse_blocks(model)[0]
    block.gate.register_forward_hook(
        lambda *_: seen.append((block.aux_loss_coef, block.z_loss_coef)) if torch.is_grad_enabled() else None
    )
    run(config, model=model, tokenizer=tokenizer)
    assert len(seen) == 3  # 8 sequences by threes
    assert sum(aux for aux, _ in seen) == pytest.approx(0.5)
    assert sum(z for _, z in seen) == pytest.approx(0.25)
    assert len({aux for aux, _ in seen}) > 1  # by their tokens, not by their number


def test_router_losses_need_experts(tmp_path: Path, policy: Policy) -> None:
    config = tiny_config(tmp_path, model={"router_z_loss_coef": 0.1})
    with pytest.raises(ConfigError, match=r"router_z_loss_coef=0\.1 are losses of routers"):
        Learner(policy[0], config)
    assert PolicyRouters(policy[0], tiny_config(tmp_path)).metrics() == {}
