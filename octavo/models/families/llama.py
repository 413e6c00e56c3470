"""Llama 2 and 3: no norms on heads; attention_bias puts a bias on q, k, v and o; Llama 3.1's RoPE scaling."""

from typing import TYPE_CHECKING, Any

from octavo.models.families.fields import read_common, require, write_common

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig


def from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate LlamaConfig's config.json."""
    return read_common(fields, "llama", head_dim=fields.get("head_dim"))


def to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of LlamaConfig."""
    require(config, qk_norm=False)
    return {**write_common(config), "mlp_bias": False}
