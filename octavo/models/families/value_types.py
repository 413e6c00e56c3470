"""What a config.json's values must be, by key: checked before any of them is used."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo.errors import CheckpointError


class Kind(NamedTuple):
    """A type of values. what: in words. holds: whether a value, never None, is one."""

    what: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))


_SIZE = Kind("a whole number >= 1", lambda value: _is_whole(value, 1))
_POSITIVE = Kind("a finite number > 0", lambda value: _is_number(value) and value > 0)
_COEFFICIENT = Kind("a finite number >= 0", lambda value: _is_number(value) and value >= 0)
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_TEXT = Kind("a string", lambda value: isinstance(value, str))
_TEXTS = Kind("a list of strings", lambda value: _are(value, lambda item: isinstance(item, str)))
_LAYERS = Kind("a list of whole numbers >= 0", lambda value: _are(value, lambda item: _is_whole(item, 0)))
_OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
_TOKEN = Kind("a whole number >= 0", lambda value: _is_whole(value, 0))
_TOKENS = Kind(
    "a whole number >= 0 or a list of such",
    lambda value: _is_whole(value, 0) or _are(value, lambda item: _is_whole(item, 0)),
)
_KINDS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings"), _SIZE),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), _SIZE),
    **dict.fromkeys(("decoder_sparse_step", "n_embd", "n_layer", "n_head", "n_positions", "n_inner"), _SIZE),
    "rotary_dim": _SIZE,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "rope_theta"), _POSITIVE),
    "router_aux_loss_coef": _COEFFICIENT,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"), _FLAG),
    **dict.fromkeys(("use_sliding_window", "output_router_logits", "scale_attn_weights"), _FLAG),
    **dict.fromkeys(("hidden_act", "activation_function"), _TEXT),
    **dict.fromkeys(("architectures", "layer_types"), _TEXTS),
    "mlp_only_layers": _LAYERS,
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT),
    "bos_token_id": _TOKEN,
    "eos_token_id": _TOKENS,
}
_ROPE_KINDS = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    "original_max_position_embeddings": _SIZE,
}


def check_values(fields: Mapping[str, Any]) -> None:
    """Refuse a value of the wrong type; null is as good as left out.

    Raises:
        CheckpointError: the first such key, what it must be, what it is.
    """
    _check(fields, _KINDS, "")
    for name in ("rope_scaling", "rope_parameters"):
        _check(fields.get(name) or {}, _ROPE_KINDS, f"{name}.")


def _check(fields: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> None:
    for name, kind in kinds.items():
        value = fields.get(name)
        if value is not None and not kind.holds(value):
            raise CheckpointError(
                f"config.json: {where}{name} must be {kind.what}, got {value!r:.80} ({type(value).__name__})"
            )
