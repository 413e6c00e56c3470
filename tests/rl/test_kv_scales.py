"""Per-tensor KV scales in the loop: who makes them, what they clip, which layers leave FP8, and stale ones by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError, RecipeError, StaleScaleError
from octavo.models import Decoder, save_model, sequence_logprobs
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.nn import PackedContext
from octavo.numerics import Numerics, get_recipe
from octavo.ops.attention import KVScaleTable, LayerShares, allocate_kv_layer, quantize_kv, write_kv
from octavo.rl import loop
from octavo.rl.config import AlgorithmSection, RLConfig
from octavo.serve import LLM, SamplingParams
from octavo.weights.kv_scales.keeper import FallbackRule
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import EASY, run
from tests.serve.random_models import sampler_logprobs

KINDS = ("engine", "trainer", "_calibrated_once", "_fixed")
NEVER = {"kv_fallback_clip_share": 0.0, "kv_fallback_flush_share": 0.0}


def with_scales(model: Decoder, kind: str, *, exact: bool = True) -> Decoder:
    model.set_numerics(Numerics(get_recipe("blockwise"), "fp8", exact, kv_scales=kind))
    return model


def kv_config(tmp_path: Path, kind: str, *, exact: bool = True, **rollout: Any) -> RLConfig:
    sections: dict[str, Any] = {} if exact else {"correction": {"kind": "token_tis"}}
    return tiny_config(tmp_path, exact=exact, rollout={"kv_scales": kind, **NEVER, **rollout}, **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_steps_under_per_tensor_scales_have_no_mismatch(tmp_path: Path, policy: Policy, kind: str) -> None:
    model, tokenizer = policy
    result = run(kv_config(tmp_path, kind), model=model, tokenizer=tokenizer)
    assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 3
    table = model.kv_table
    assert table is not None and table.source == kind
    assert (set(table.scale.flatten().tolist()) == {1.0}) == (kind == "_fixed")
    lags = [row["kv/scale_lag_max"] for row in result.history]
    assert lags == ([0.0, 1.0, 2.0] if kind == "_calibrated_once" else [0.0] * 3)
    for row in result.history:
        shares = [row[f"kv/layer_0/{role}_clipped_share"] for role in "kv"]
        assert max(shares) == row["kv/clipped_share_max"]
        assert row["kv/num_bf16_layers"] == 0.0


def test_the_reference_policy_needs_no_scales_of_its_own(tmp_path: Path, policy: Policy) -> None:
    config = kv_config(tmp_path, "engine").model_copy(update={"algorithm": AlgorithmSection(kl_coef=0.1)})
    result = run(config, model=policy[0], tokenizer=policy[1])
    assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 3
    assert result.history[-1]["actor/kl_loss"] > 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_inexact_rollouts_under_per_tensor_scales(tmp_path: Path, policy: Policy, kind: str) -> None:
    result = run(kv_config(tmp_path, kind, exact=False), model=policy[0], tokenizer=policy[1])
    assert all(row["rollout_corr/k3_kl"] > 0.0 for row in result.history)
    assert policy[0].kv_table is None  # the trainer's numerics have no cache
    lags = [row["kv/scale_lag_max"] for row in result.history]
    assert lags == ([0.0, 1.0, 2.0] if kind == "_calibrated_once" else [0.0] * 3)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
def test_a_layer_that_clips_falls_back_and_says_so(
    tmp_path: Path, policy: Policy, capfd: pytest.CaptureFixture[str], exact: bool
) -> None:
    model, tokenizer = policy
    layer = model.layers[0].self_attn
    layer.k_norm = layer.q_norm = None  # as models without QK-norm
    with torch.no_grad():
        model.layers[0].self_attn.qkv_proj.weight[-2 * 16 :] *= 1000.0  # K and V far beyond 448
    model.mark_weights_updated()
    config = kv_config(tmp_path, "_fixed", exact=exact, kv_fallback_clip_share=1e-3)
    result = loop.run(config, model=model, tokenizer=tokenizer, task=EASY)
    assert result.history[0]["kv/clipped_share_max"] > 1e-3
    assert [row["kv/num_bf16_layers"] for row in result.history] == [1.0] * 3
    assert "kv/clipped_share_max" not in result.history[1].metrics  # no FP8 layer is left to look at
    assert "layer 0: the KV cache falls back from FP8 to bf16, for" in capfd.readouterr().err
    if exact:
        assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 3


def test_the_rule_names_what_is_too_much() -> None:
    rule = FallbackRule(clip_share=0.01, flush_share=0.1)
    assert rule.reason(LayerShares(0.01, 0.0, 0.1, 0.0)) is None
    assert rule.reason(LayerShares(0.0, 0.02, 0.0, 0.0)) == "2.00% of V was clipped, more than 1.00%"
    assert rule.reason(LayerShares(0.0, 0.0, 0.2, 0.3)) == "30.00% of V was flushed to zero, more than 10.00%"
    assert FallbackRule(0.0, 0.0).reason(LayerShares(1.0, 1.0, 1.0, 1.0)) is None


def generate(llm: LLM) -> list[float]:
    params = SamplingParams(max_tokens=4, temperature=1.0, logprobs=0, seed=0, ignore_eos=True)
    return sampler_logprobs(llm.generate([[1, 2, 3]], params)[0])[0]


def test_a_stale_scale_is_caught_by_name(policy: Policy) -> None:
    model = with_scales(policy[0], "trainer")
    llm = LLM(model, tokenizer=policy[1])
    with pytest.raises(StaleScaleError, match="KV scales of layer 0 were never set, so they would be 1 by omission"):
        generate(llm)
    table = model.kv_table
    assert table is not None
    pair = (torch.tensor(0.01), torch.tensor(0.01))
    table.set({0: pair}, model.weight_version)
    assert len(generate(llm)) == 4
    model.mark_weights_updated()
    now = model.weight_version
    with pytest.raises(StaleScaleError, match=f"made for weight version {now - 1}, but the weights are version {now}"):
        generate(llm)
    table.set({0: pair}, now)
    assert len(generate(llm)) == 4


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused_and_nothing_taken(bad: float) -> None:
    table = KVScaleTable(2, "trainer")
    good = torch.tensor(0.5)
    with pytest.raises(StaleScaleError, match="layer 1 must be finite and positive"):
        table.set({0: (good, good), 1: (good, torch.tensor(bad))}, 3)
    assert table.versions == [None, None] and table.scale.flatten().tolist() == [1.0] * 4


def test_engine_scales_are_made_by_the_first_batch_of_each_version(policy: Policy) -> None:
    model = with_scales(policy[0], "engine")
    llm = LLM(model, tokenizer=policy[1])
    table = model.kv_table
    assert table is not None
    found = []
    for _ in range(2):
        generate(llm)
        first = table.scale.clone()
        generate(llm)
        assert torch.equal(table.scale, first)  # the second batch takes what the first one made
        found.append(first)
        with torch.no_grad():
            model.layers[0].self_attn.qkv_proj.weight *= 2.0
        model.mark_weights_updated()
    assert not torch.equal(found[0], found[1])


def test_scales_change_in_place(policy: Policy) -> None:
    """CUDA graphs hold their addresses."""
    model = with_scales(policy[0], "engine")
    llm = LLM(model, tokenizer=policy[1])
    table = model.kv_table
    assert table is not None
    known = llm.engine.model_runner.layers[0].known
    assert known is not None
    places = [x.data_ptr() for x in (known.scale, known.quant_scale, known.counts)]
    assert places == [x[0].data_ptr() for x in (table.scale, table.quant_scale, table.counts)]
    generate(llm)
    table.set({0: (torch.tensor(0.25), torch.tensor(2.0))}, model.weight_version)
    table.load_state_dict(table.state_dict())
    assert known.scale.tolist() == [0.25, 2.0] and known.quant_scale.tolist() == [4.0, 0.5]
    assert places == [x[0].data_ptr() for x in (table.scale, table.quant_scale, table.counts)]


def test_trainer_and_sampler_agree_under_a_scale_that_clips(policy: Policy) -> None:
    model = with_scales(policy[0], "trainer")
    assert model.kv_table is not None
    model.kv_table.set({0: (torch.tensor(1e-4), torch.tensor(1e-4))}, model.weight_version)
    llm = LLM(model, tokenizer=policy[1])
    params = SamplingParams(max_tokens=6, temperature=1.0, logprobs=0, seed=0, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params)
    trained = sequence_logprobs(model, [[1, 2, 3, *output.outputs[0].token_ids]])[0][2:]
    assert [trained.tolist()] == sampler_logprobs(output)
    trained.sum().backward()
    grad = model.layers[0].self_attn.qkv_proj.weight.grad
    assert grad is not None and torch.isfinite(grad).all() and grad.any()
    (shares,) = model.kv_table.take_shares(16).values()
    assert min(shares.k_clipped, shares.v_clipped) > 0.5


def test_shares_count_what_is_clipped_and_flushed() -> None:
    table = KVScaleTable(1, "trainer")
    layer = allocate_kv_layer(1, 1, 16, "fp8", known=table.layer(0))
    table.set({0: (torch.tensor(1.0), torch.tensor(1.0))}, 0)
    k, v = torch.zeros(4, 1, 16), torch.full((4, 1, 16), 448.0)
    k[0], k[1], v[0] = 1000.0, 2.0**-10, 449.0
    write_kv(layer, k.bfloat16(), v, torch.arange(4))
    table.num_written = 4
    (shares,) = table.take_shares(16).values()
    assert shares == LayerShares(k_clipped=0.25, v_clipped=0.25, k_flushed=0.25, v_flushed=0.0)
    assert table.take_shares(16) == {}  # nothing was written since
    codes, scale = quantize_kv(v, table.layer(0), 1)
    assert (codes.float() * scale[..., None]).max() == 448.0  # saturated, not NaN


def test_an_update_without_its_scales_is_refused(tmp_path: Path, policy: Policy) -> None:
    model = with_scales(policy[0], "trainer")
    llm = LLM(model, tokenizer=policy[1])
    save_model(model, tmp_path / "bare")
    version = model.weight_version
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.k_scale: .* none came"):
        llm.update_weights(tmp_path / "bare")
    assert model.weight_version == version
    model.kv_scales = (KVScales(torch.tensor([0.5]), torch.tensor([0.25])),)
    save_model(model, tmp_path / "whole")
    llm.update_weights(tmp_path / "whole")
    assert model.kv_table is not None
    assert model.kv_table.scale.tolist() == [[0.5, 0.25]] and model.kv_table.versions == [model.weight_version]
    assert len(generate(llm)) == 4


def test_scales_need_an_fp8_cache_and_a_table(tmp_path: Path, policy: Policy) -> None:
    with pytest.raises(ConfigError, match="kv_scales='engine' scales an FP8 cache"):
        tiny_config(tmp_path, rollout={"kv_scales": "engine", "kv_cache_dtype": "bf16"})
    with pytest.raises(RecipeError, match="needs the model's table of KV scales"):
        PackedContext.from_lengths([3], Numerics(get_recipe("blockwise"), "fp8", kv_scales="_fixed"))
    llm = LLM(with_scales(policy[0], "engine"), tokenizer=policy[1])
    with_scales(policy[0], "engine")  # makes another table, which the engine's cache does not read
    with pytest.raises(ConfigError, match="make a new LLM"):
        generate(llm)


@pytest.mark.parametrize(("former", "kind"), [("one", "_fixed"), ("calibrated_once", "_calibrated_once")])
def test_former_kinds_are_taken_from_a_file_with_a_warning(tmp_path: Path, former: str, kind: str) -> None:
    with pytest.warns(DeprecationWarning, match="use one of per_token_head, engine, trainer"):
        assert kv_config(tmp_path, former).rollout_numerics.kv_scales == kind
    with pytest.raises(RecipeError, match=r"\('per_token_head', 'engine', 'trainer'\), got"):
        Numerics(get_recipe("blockwise"), "fp8", kv_scales=former)
    with pytest.raises(ConfigError, match="'per_token_head', 'engine' or 'trainer', got"):
        kv_config(tmp_path, "two")
