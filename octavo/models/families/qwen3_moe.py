"""Qwen3 with experts: Qwen3's attention, a router and SwiGLU experts in every decoder_sparse_step-th layer."""

from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError
from octavo.models.families.fields import read_common, require, write_common

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

# Sizes that a config.json must have; ours have the same names.
_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_DEFAULT_COEFFICIENT = 0.001  # Qwen3MoeConfig's, of no effect without output_router_logits


def from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate Qwen3MoeConfig's config.json.

    The load-balancing loss is on where output_router_logits is, as in transformers.
    """
    fields = {"use_sliding_window": False, **fields}
    if fields.get("num_experts") is None and "num_local_experts" in fields:  # transformers 5's name
        fields["num_experts"] = fields["num_local_experts"]
    for name in _SIZES:
        if fields.get(name) is None:
            raise CheckpointError(f"config.json: {name} is missing, which a qwen3_moe model needs")
    coefficient = fields.get("router_aux_loss_coef", _DEFAULT_COEFFICIENT)
    step = fields.get("decoder_sparse_step")
    return read_common(
        fields,
        "qwen3_moe",
        head_dim=fields.get("head_dim"),
        qk_norm=True,
        **{name: fields[name] for name in _SIZES},
        norm_topk_prob=fields.get("norm_topk_prob") or False,
        decoder_sparse_step=1 if step is None else step,
        mlp_only_layers=tuple(fields.get("mlp_only_layers") or ()),
        router_aux_loss_coef=coefficient if fields.get("output_router_logits") else 0.0,
    )


def to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of Qwen3MoeConfig."""
    require(config, qk_norm=True)
    return {
        **write_common(config),
        "use_sliding_window": False,
        "sliding_window": None,
        **{name: getattr(config, name) for name in _SIZES},
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": config.decoder_sparse_step,
        "mlp_only_layers": list(config.mlp_only_layers),
        "output_router_logits": config.router_aux_loss_coef > 0,
        "router_aux_loss_coef": config.router_aux_loss_coef or _DEFAULT_COEFFICIENT,
    }
