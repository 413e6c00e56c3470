"""ModelConfig and its translations: both layouts of RoPE, refused fields, bad values."""

import dataclasses
import math
from typing import Any

import pytest

from octavo.errors import CheckpointError, ConfigError, ShapeError
from octavo.models import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": [7, 9],
    "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_llama_fields() -> None:
    config = ModelConfig.from_hf({**LLAMA, "attention_bias": True, "rope_theta": 5e5})
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    others = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "attention_bias": True, "eos_token_ids": (7, 9)}
    assert config == ModelConfig("llama", 96, 64, 160, **sizes, **others)  # type: ignore[arg-type]


def test_qwen3_fields() -> None:
    config = ModelConfig.from_hf({**LLAMA, "architectures": None, "model_type": "qwen3", "num_key_value_heads": None})
    assert (config.head_dim, config.qk_norm, config.num_kv_heads) == (128, True, 4)


def test_qwen2_fields() -> None:
    fields = {**LLAMA, "architectures": None, "model_type": "qwen2", "sliding_window": 32768, "max_window_layers": 28}
    config = ModelConfig.from_hf(fields)
    assert (config.attention_bias, config.out_bias, config.head_dim) == (True, False, 16)
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        ModelConfig.from_hf({**fields, "use_sliding_window": True})
    with pytest.raises(ConfigError, match="head_dim=32"):
        dataclasses.replace(config, head_dim=32).to_hf()


def test_mistral_fields() -> None:
    fields = {**LLAMA, "architectures": None, "model_type": "mistral", "head_dim": 32}
    config = ModelConfig.from_hf({**fields, "sliding_window": None})
    assert (config.attention_bias, config.head_dim) == (False, 32)
    with pytest.raises(CheckpointError, match="sliding_window = 4096"):
        ModelConfig.from_hf(fields)


MOE: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.01,
}  # fmt: skip


def test_qwen3_moe_fields() -> None:
    config = ModelConfig.from_hf({**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [config.has_experts(i) for i in range(4)] == [False, True, False, False]
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 48)
    assert (config.norm_topk_prob, config.router_aux_loss_coef, config.qk_norm) == (True, 0.0, True)
    assert ModelConfig.from_hf({**MOE, "output_router_logits": True}).router_aux_loss_coef == 0.01
    renamed = {**{k: v for k, v in MOE.items() if k != "num_experts"}, "num_local_experts": 8}
    assert ModelConfig.from_hf(renamed) == ModelConfig.from_hf(MOE)


GPTJ: dict[str, Any] = {
    "model_type": "gptj", "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512,
    "rotary_dim": 8, "activation_function": "gelu_new", "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_gptj_fields() -> None:
    config = ModelConfig.from_hf(GPTJ)
    assert (config.hidden_size, config.intermediate_size, config.head_dim, config.rotary_dim) == (64, 256, 16, 8)
    assert (config.num_kv_heads, config.max_position_embeddings, config.eos_token_ids) == (4, 512, (2,))
    assert ModelConfig.from_hf(config.to_hf()) == config
    inner = ModelConfig.from_hf({**GPTJ, "n_inner": 100})
    assert inner.intermediate_size == inner.to_hf()["n_inner"] == 100
    with pytest.raises(ConfigError, match="num_kv_heads=4"):
        dataclasses.replace(config, num_kv_heads=2).to_hf()


@pytest.mark.parametrize(
    "layout",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **ROPE}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **ROPE}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **ROPE}},
    ],
    ids=["old", "older", "transformers5", "both"],
)
def test_rope_layouts_say_the_same(layout: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**LLAMA, **layout})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == {"rope_type": "llama3", **ROPE}


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}, {"rope_theta": 3.0}),
        ({"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 2}, {}),
    ],
)
def test_fields_that_change_nothing(fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert ModelConfig.from_hf({**LLAMA, **fields}) == ModelConfig.from_hf({**LLAMA, **same})


@pytest.mark.parametrize(
    "fields", [{}, {"attention_bias": True}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}]
)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_there_and_back(model_type: str, fields: dict[str, Any]) -> None:
    common = {**MOE, "sliding_window": None, "output_router_logits": True, "mlp_only_layers": [0]}
    config = ModelConfig.from_hf({**common, "architectures": None, "model_type": model_type, **fields})
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert isinstance(hash(config), int)


@pytest.mark.parametrize(
    ("base", "fields", "named"),
    [
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"use_sliding_window": True}, "use_sliding_window"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta": 1.0}}, "beta"),
        (LLAMA, {"model_type": "gpt2"}, "gpt2"),
        (LLAMA, {"model_type": None}, "model_type"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA, {"hidden_size": None}, "hidden_size"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads"),
        (LLAMA, {"num_key_value_heads": 3}, "num_kv_heads=3"),
        (LLAMA, {"head_dim": 15}, "head_dim"),
        (LLAMA, {"vocab_size": "many"}, "vocab_size"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id"),
        (LLAMA, {"model_type": ["llama"]}, "model_type"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers"),
        (MOE, {"num_experts": None}, "num_experts"),
        (MOE, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (MOE, {"mlp_only_layers": [2]}, "mlp_only_layers"),
        (MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        (MOE, {"output_router_logits": True, "router_aux_loss_coef": -1.0}, "router_aux_loss_coef"),
        (MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (GPTJ, {"n_embd": None}, "n_embd"),
        (GPTJ, {"activation_function": "relu"}, "activation_function"),
        (GPTJ, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (GPTJ, {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPTJ, {"rotary_dim": 7}, "rotary_dim"),
        (GPTJ, {"rotary_dim": 18}, "rotary_dim"),
        (GPTJ, {"rotary_dim": None}, "rotary_dim"),
        (GPTJ, {"n_head": 0}, "n_head"),
    ],
    ids=str,
)
def test_unsupported_fields_are_named(base: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_hf({**base, **fields})


ODD = ["128", "", 128.5, [128], [[1]], [None], {}, {"a": 1}, None, -1, 0, True, False, math.nan, math.inf]
TYPED = {
    "llama": {
        **LLAMA,
        "head_dim": 16,
        "rope_theta": 1e4,
        "bos_token_id": 1,
        "attention_bias": False,
        "layer_types": None,
        "rope_scaling": {"rope_type": "llama3", **ROPE},
    },
    "qwen3_moe": {**MOE, "mlp_only_layers": [0], "output_router_logits": True},
    "gptj": {**GPTJ, "n_inner": 100},
}


@pytest.mark.parametrize("family", TYPED)
def test_a_value_of_any_type_is_taken_or_refused_by_its_key(family: str) -> None:
    for key in TYPED[family]:
        for value in ODD:
            refusal = ""
            try:
                ModelConfig.from_hf({**TYPED[family], key: value})
            except CheckpointError as error:
                refusal = str(error)
            assert not refusal or key in refusal, f"{key} = {value!r}: {refusal}"


@pytest.mark.parametrize("key", ["rope_type", *ROPE])
def test_a_rope_value_of_any_type_is_refused_by_its_key(key: str) -> None:
    for value in (value for value in ODD if value not in (None, 128.5)):
        scaling = {"rope_type": "llama3", **ROPE, key: value}
        with pytest.raises(CheckpointError, match=rf"rope_scaling.*{key}"):
            ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_layers": 0}, ConfigError),
        ({"hidden_size": 64.0}, ConfigError),
        ({"vocab_size": True}, ConfigError),
        ({"rms_norm_eps": 0.0}, ConfigError),
        ({"rope_theta": float("inf")}, ConfigError),
        ({"qk_norm": 1}, ConfigError),
        ({"family": "gpt2"}, ConfigError),
        ({"num_experts": 8}, ConfigError),
        ({"eos_token_ids": [1]}, ConfigError),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ConfigError),
        ({"rope_scaling": {"rope_type": "llama3", **ROPE, "low_freq_factor": 4.0}}, ConfigError),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, ConfigError),
        ({"num_kv_heads": 3}, ShapeError),
        ({"head_dim": 7}, ShapeError),
    ],
    ids=str,
)
def test_impossible_values_are_refused(config: ModelConfig, change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(change))):
        dataclasses.replace(config, **change)


@pytest.mark.parametrize(
    ("change", "named"), [({"family": "llama"}, "qk_norm=False"), ({"rotary_dim": 8}, "rotary_dim=None")]
)
def test_a_family_cannot_be_written_with_what_its_config_lacks(
    config: ModelConfig, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(config, **change).to_hf()
