"""ModelConfig: the architecture of one decoder, with octavo's names; families translate Hugging Face's config.json."""

import dataclasses
import math
from typing import Any

from octavo.errors import ConfigError, ShapeError

FAMILY_NAMES = ("llama", "qwen3")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)
# rope_type -> the numbers that it needs, all > 0
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a dense decoder (Llama, Qwen3).

    Args:
        family: "llama" or "qwen3": whose config.json and tensor names a checkpoint of it has.
        vocab_size: rows of the embedding.
        hidden_size, intermediate_size: width of the residual stream and of the MLP.
        num_layers, num_heads, num_kv_heads: num_heads a multiple of num_kv_heads (GQA).
        head_dim: even; num_heads * head_dim need not be hidden_size.
        rms_norm_eps: of every norm.
        rope_theta: RoPE's base.
        rope_scaling: None, or Hugging Face's dict: rope_type "llama3" with factor, low_freq_factor, high_freq_factor
            and original_max_position_embeddings, or rope_type "linear" with factor.
        max_position_embeddings: longest sequence that the model may see.
        tie_word_embeddings: lm_head is the embedding.
        attention_bias: biases on the q, k, v and o projections.
        qk_norm: RMSNorm on each head of q and k (Qwen3).
        bos_token_id, eos_token_ids: carried through checkpoints; generation stops at the latter.

    Raises:
        ConfigError: a value of the wrong type or out of range. ShapeError: sizes that do not fit one another.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = dataclasses.field(default=None, hash=False)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILY_NAMES:
            raise ConfigError(f"family must be one of {', '.join(FAMILY_NAMES)}, got {self.family!r}")
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            _check_positive(name, getattr(self, name))
        for name in ("tie_word_embeddings", "attention_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        _check_rope_scaling(self.rope_scaling)
        self._check_token_ids()
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}: every kv head "
                "serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ShapeError(f"head_dim must be even, because RoPE turns pairs, got {self.head_dim}")

    def _check_token_ids(self) -> None:
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for name, ids in (("bos_token_id", bos), ("eos_token_ids", self.eos_token_ids)):
            if not isinstance(ids, tuple) or not all(isinstance(i, int) and i >= 0 for i in ids):
                raise ConfigError(f"{name} must be whole numbers >= 0, got {getattr(self, name)!r}")

    @property
    def q_dim(self) -> int:
        """Rows of q_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters of the model; a tied lm_head counts once."""
        qkv = self.q_dim + 2 * self.kv_dim
        attention = self.hidden_size * (qkv + self.q_dim)
        attention += (qkv + self.hidden_size) * self.attention_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "ModelConfig":
        """Translate a Hugging Face config.json.

        Raises:
            CheckpointError: another architecture, or a field that octavo does not support, which is named.
        """
        from octavo.models import families

        return families.from_hf(fields)

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers reads as this architecture.

        Raises:
            ConfigError: the family's config.json has no field for what this config asks (norms on heads in a Llama).
        """
        from octavo.models import families

        return families.to_hf(self)


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number > 0, got {value!r}")


def _check_rope_scaling(scaling: Any) -> None:
    if scaling is None:
        return
    kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
    if kind not in _ROPE_NUMBERS:
        raise ConfigError(
            f"rope_scaling must be None or have a rope_type of {', '.join(_ROPE_NUMBERS)}, got {scaling!r}"
        )
    numbers = _ROPE_NUMBERS[kind]
    if set(scaling) != {"rope_type", *numbers}:
        raise ConfigError(f"rope_scaling of rope_type {kind!r} has {', '.join(numbers)}, got {scaling!r}")
    for name in numbers:
        _check_positive(f"rope_scaling.{name}", scaling[name])
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ConfigError(f"rope_scaling needs low_freq_factor < high_freq_factor, got {scaling!r}")
