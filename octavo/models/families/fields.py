"""What the families' config.json have in common: required fields, refused fields, and the layouts of RoPE."""

from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
# Fields that change the computation and that the decoder does not have: the values under which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "pretraining_tp": (1, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0.0, None),
}


def read_common(fields: dict[str, Any], family: str, *, head_dim: int | None, **specific: Any) -> dict[str, Any]:
    """ModelConfig's arguments, of fields that every family has.

    Args:
        head_dim: None for hidden_size / num_attention_heads.
        specific: ModelConfig fields of one family.
    Raises:
        CheckpointError: a missing or refused field, by its name in config.json.
    """
    for hf_name in _REQUIRED.values():
        if fields.get(hf_name) is None:
            raise CheckpointError(f"config.json: {hf_name} is missing, which a {family} model needs")
    refuse_unsupported(fields)
    rope_theta, rope_scaling = read_rope(fields)
    return {
        "family": family,
        **{name: fields[hf_name] for name, hf_name in _REQUIRED.items()},
        "num_kv_heads": _or(fields.get("num_key_value_heads"), fields["num_attention_heads"]),
        "max_position_embeddings": _or(fields.get("max_position_embeddings"), 2048),
        "rms_norm_eps": _or(fields.get("rms_norm_eps"), 1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": _or(fields.get("tie_word_embeddings"), False),
        "bos_token_id": fields.get("bos_token_id"),
        "eos_token_ids": read_token_ids(fields.get("eos_token_id")),
        "head_dim": _or(head_dim, fields["hidden_size"] // (fields["num_attention_heads"] or 1)),
        "attention_bias": _or(fields.get("attention_bias"), False),
        **specific,
    }


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Refuse what would silently give other logits.

    Raises:
        CheckpointError: naming field and value.
    """
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            raise CheckpointError(f"config.json: {name} = {fields[name]!r} is not supported; only {neutral[0]!r} is")
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False:
        raise CheckpointError(
            f"config.json: sliding_window = {fields['sliding_window']!r} is not supported: attention sees all earlier "
            "tokens"
        )
    layer_types = fields.get("layer_types") or []
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other:
        raise CheckpointError(f"config.json: layer_types has {', '.join(other)}; only full_attention is supported")


def read_rope(fields: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """RoPE's base and scaling, from `rope_theta` and `rope_scaling` or from transformers 5's `rope_parameters`.

    Raises:
        CheckpointError: RoPE on a part of each head.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = dict(fields.get(name) or {})
    theta = _or(rope.pop("rope_theta", None), _or(fields.get("rope_theta"), 10_000.0))
    old_name = rope.pop("type", None)
    kind = _or(rope.pop("rope_type", None), _or(old_name, "default"))
    if rope.pop("partial_rotary_factor", None) not in _NEUTRAL["partial_rotary_factor"]:
        raise CheckpointError(f"config.json: {name}.partial_rotary_factor other than 1.0 is not supported")
    if kind == "default":
        return theta, None
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
    return theta, {"rope_type": kind, **rope}


def write_common(config: "ModelConfig") -> dict[str, Any]:
    """The fields that every family has.

    RoPE is written as `rope_theta` and `rope_scaling`, which every version of transformers reads.
    """
    require(config, rotary_dim=None)
    return {
        "model_type": config.family,
        **{hf_name: getattr(config, name) for name, hf_name in _REQUIRED.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": write_token_ids(config.eos_token_ids),
    }


def require(config: "ModelConfig", **expected: Any) -> None:
    """Refuse a config that its family's config.json cannot express.

    Raises:
        ConfigError: naming the field.
    """
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"a {config.family} model has {name}={value}, got {getattr(config, name)}; its config.json has no "
                "field for another"
            )


def read_token_ids(value: Any) -> tuple[int, ...]:
    """eos_token_id, which is null, a number or a list of them."""
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def write_token_ids(ids: tuple[int, ...]) -> int | list[int] | None:
    """eos_token_id as config.json has it."""
    return ids[0] if len(ids) == 1 else list(ids) or None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
