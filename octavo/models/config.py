"""ModelConfig: the architecture of one decoder, with octavo's names; families translate Hugging Face's config.json."""

import dataclasses
import math
from typing import Any

from octavo.errors import CheckpointError, ConfigError, ShapeError
from octavo.models import families

FAMILY_NAMES = tuple(families.FAMILIES)
MOE_FAMILIES = tuple(name for name, family in families.FAMILIES.items() if family.has_experts)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
          "max_position_embeddings")  # fmt: skip
# rope_type -> the numbers that it needs, all > 0
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder.

    Args:
        family: one of FAMILY_NAMES: whose config.json and tensor names a checkpoint of it has.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: decoder layers.
        num_heads: query heads, a multiple of num_kv_heads (GQA).
        num_kv_heads: key and value heads.
        head_dim: even; num_heads * head_dim need not be hidden_size.
        rms_norm_eps: of every norm, LayerNorm (GPT-J) included.
        rope_theta: RoPE's base.
        rope_scaling: None, or Hugging Face's dict: rope_type "llama3" with factor, low_freq_factor, high_freq_factor
            and original_max_position_embeddings, or rope_type "linear" with factor.
        rotary_dim: elements of a head that RoPE turns, even; None for all of them.
        max_position_embeddings: longest sequence that the model may see.
        tie_word_embeddings: lm_head is the embedding.
        attention_bias: biases on the q, k and v projections, and but for Qwen2 on o.
        qk_norm: RMSNorm on each head of q and k (Qwen3).
        num_experts: of the layers with experts; 0 in a dense family, as the next two are.
        num_experts_per_tok: experts that a token meets.
        moe_intermediate_size: width of one expert.
        norm_topk_prob: a token's expert weights are divided by their sum.
        decoder_sparse_step: every so manieth layer has experts.
        mlp_only_layers: layers that have none all the same.
        router_aux_loss_coef: of the load-balancing loss in training; 0 is off.
        bos_token_id: carried through checkpoints.
        eos_token_ids: carried through checkpoints; generation stops at them.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        ShapeError: sizes that do not fit one another.
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
    rotary_dim: int | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILY_NAMES:
            raise ConfigError(f"family must be one of {', '.join(FAMILY_NAMES)}, got {self.family!r}")
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            _check_positive(name, getattr(self, name))
        for name in ("tie_word_embeddings", "attention_bias", "qk_norm", "norm_topk_prob"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        _check_rope_scaling(self.rope_scaling)
        self._check_token_ids()
        self._check_experts()
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}: every kv head "
                "serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ShapeError(f"head_dim must be even, because RoPE turns pairs, got {self.head_dim}")
        if self.rotary_dim is not None:
            _check_size("rotary_dim", self.rotary_dim)
            if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
                raise ShapeError(f"rotary_dim must be even and at most head_dim={self.head_dim}, got {self.rotary_dim}")
        if self.is_parallel and self.tie_word_embeddings:
            raise ConfigError(f"a {self.family} model has an lm_head of its own: tie_word_embeddings must be false")

    def _check_experts(self) -> None:
        sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if self.family not in MOE_FAMILIES:
            given = [name for name in (*sizes, "router_aux_loss_coef", "mlp_only_layers") if getattr(self, name)]
            if given:
                raise ConfigError(f"a {self.family} model has no experts, but {', '.join(given)} was given")
            return
        for name in (*sizes, "decoder_sparse_step"):
            _check_size(name, getattr(self, name))
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most num_experts={self.num_experts}"
            )
        layers = self.mlp_only_layers
        if not isinstance(layers, tuple) or not all(isinstance(i, int) and 0 <= i < self.num_layers for i in layers):
            raise ConfigError(f"mlp_only_layers must be layers 0 to {self.num_layers - 1}, got {layers!r}")
        coefficient = self.router_aux_loss_coef
        if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
            raise ConfigError(f"router_aux_loss_coef must be a finite number >= 0, got {coefficient!r}")

    def has_experts(self, layer_index: int) -> bool:
        """Whether a layer's feed-forward block is a mixture of experts."""
        if self.family not in MOE_FAMILIES or layer_index in self.mlp_only_layers:
            return False
        return (layer_index + 1) % self.decoder_sparse_step == 0

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
    def out_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self.attention_bias and families.FAMILIES[self.family].has_out_bias

    @property
    def is_parallel(self) -> bool:
        """GPT-J's layers: attention and a GeLU MLP side by side under one LayerNorm, interleaved RoPE, a head bias."""
        return families.FAMILIES[self.family].is_parallel

    @property
    def num_params(self) -> int:
        """Parameters of the model; a tied lm_head counts once."""
        hidden, heads = self.hidden_size, 1 if self.tie_word_embeddings else 2
        qkv = self.q_dim + 2 * self.kv_dim
        attention = hidden * (qkv + self.q_dim)
        attention += qkv * self.attention_bias + hidden * self.out_bias + 2 * self.head_dim * self.qk_norm
        if self.is_parallel:
            mlp = 2 * hidden * self.intermediate_size + self.intermediate_size + hidden
            return (2 * hidden + 1) * self.vocab_size + self.num_layers * (attention + mlp + 2 * hidden) + 2 * hidden
        num_sparse = sum(map(self.has_experts, range(self.num_layers)))
        mlps = 3 * hidden * self.intermediate_size * (self.num_layers - num_sparse)
        mlps += hidden * self.num_experts * (1 + 3 * self.moe_intermediate_size) * num_sparse
        return heads * hidden * self.vocab_size + self.num_layers * (attention + 2 * hidden) + mlps + hidden

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "ModelConfig":
        """Translate a Hugging Face config.json.

        Raises:
            CheckpointError: another architecture, or a field that octavo does not support, which is named.
        """
        try:
            return cls(**families.from_hf(fields))
        except (ConfigError, ShapeError) as error:
            raise CheckpointError(f"config.json: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers reads as this architecture.

        Raises:
            ConfigError: the family's config.json has no field for what this config asks (norms on heads in a Llama).
        """
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
