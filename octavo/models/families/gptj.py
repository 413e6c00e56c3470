"""GPT-J: attention and MLP in parallel under one LayerNorm, RoPE on a part of each head, biases outside attention."""

from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError
from octavo.models.families.fields import read_token_ids, require, write_token_ids

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

_REQUIRED = {"vocab_size": "vocab_size", "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head"}
# Values under which a field does nothing here; dropout is off in octavo, and in every model that only samples.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new",),
    "tie_word_embeddings": (False, None),
    "scale_attn_weights": (True, None),
}
_ROTARY_DIM = 64  # GPTJConfig's
_THETA = 10_000.0  # fixed in the architecture


def from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate GPTJConfig's config.json."""
    for hf_name in _REQUIRED.values():
        if fields.get(hf_name) is None:
            raise CheckpointError(f"config.json: {hf_name} is missing, which a gptj model needs")
    if fields.get("rotary_dim", _ROTARY_DIM) is None:
        raise CheckpointError(
            "config.json: rotary_dim = None is not supported; a number is, hidden_size / n_head at most"
        )
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            raise CheckpointError(f"config.json: {name} = {fields[name]!r} is not supported; only {neutral[0]!r} is")
    return {
        "family": "gptj",
        **{name: fields[hf_name] for name, hf_name in _REQUIRED.items()},
        "intermediate_size": fields.get("n_inner") or 4 * fields["n_embd"],
        "num_kv_heads": fields["n_head"],
        "head_dim": fields["n_embd"] // (fields["n_head"] or 1),
        "rms_norm_eps": fields.get("layer_norm_epsilon") or 1e-5,
        "rope_theta": _THETA,
        "rotary_dim": fields.get("rotary_dim", _ROTARY_DIM),
        "max_position_embeddings": fields.get("n_positions") or 2048,
        "bos_token_id": fields.get("bos_token_id"),
        "eos_token_ids": read_token_ids(fields.get("eos_token_id")),
    }


def to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of GPTJConfig."""
    require(config, qk_norm=False, attention_bias=False, rope_theta=_THETA, rope_scaling=None)
    require(config, num_kv_heads=config.num_heads, head_dim=config.hidden_size // config.num_heads)
    is_default = config.intermediate_size == 4 * config.hidden_size
    return {
        "model_type": config.family,
        **{hf_name: getattr(config, name) for name, hf_name in _REQUIRED.items()},
        "n_positions": config.max_position_embeddings,
        "n_inner": None if is_default else config.intermediate_size,
        "rotary_dim": config.rotary_dim or config.head_dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.rms_norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": write_token_ids(config.eos_token_ids),
    }
