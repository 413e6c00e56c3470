"""Qwen3, dense: RMSNorm on each head of q and k, head_dim apart from hidden_size, no sliding window."""

from typing import TYPE_CHECKING, Any

from octavo.models.families.fields import read_common, require, write_common

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

_DEFAULT_HEAD_DIM = 128  # Qwen3Config's, whatever the width


def from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate Qwen3Config's config.json."""
    return read_common(fields, "qwen3", head_dim=fields.get("head_dim") or _DEFAULT_HEAD_DIM, qk_norm=True)


def to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of Qwen3Config."""
    require(config, qk_norm=True)
    return {**write_common(config), "use_sliding_window": False, "sliding_window": None}
