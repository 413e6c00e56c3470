"""Sections of a configuration that the training loop and the RL loop have in common."""

from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from octavo.config import Config


class ModelSection(Config):
    """The decoder, by Hugging Face's names, or a checkpoint to continue from.

    Args:
        path: a checkpoint directory whose weights, architecture and tokenizer are taken; the other keys then
            have no say. Empty: a new model with random weights.
        family: "qwen3" (norms on queries and keys), "llama", "mistral", "qwen2" (biases on q, k and v), "qwen3_moe" or
            "gptj" (needs num_key_value_heads = num_attention_heads and tie_word_embeddings = false).
        rotary_dim: elements of a head that RoPE turns ("gptj"); 0 for all.
        num_experts: of every layer of a "qwen3_moe"; 0 in the others.
        num_experts_per_tok: of every layer of a "qwen3_moe"; 0 in the others.
        moe_intermediate_size: of every layer of a "qwen3_moe"; 0 in the others.
        router_aux_loss_coef: of the load-balancing loss, summed over layers, the mean over micro-batches; 0 is off,
            unset is what the checkpoint says (off in a new model).
        router_z_loss_coef: of the router's z-loss. Both coefficients have a say with a path too; their gradients count,
            the loss that is reported is without them.
        head_dim: 0 for hidden_size / num_attention_heads.
        max_position_embeddings: 0 for data.seq_len; the longest text that the model may later sample.
    """

    path: str = ""
    family: Literal["qwen3", "llama", "mistral", "qwen2", "qwen3_moe", "gptj"] = "qwen3"
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: NonNegativeInt = 0
    max_position_embeddings: NonNegativeInt = 0
    rope_theta: PositiveFloat = 10_000.0
    rotary_dim: NonNegativeInt = 0
    num_experts: NonNegativeInt = 0
    num_experts_per_tok: NonNegativeInt = 0
    moe_intermediate_size: NonNegativeInt = 0
    router_aux_loss_coef: NonNegativeFloat | None = None
    router_z_loss_coef: NonNegativeFloat = 0.0
    tie_word_embeddings: bool = True


class OptimizerSection(Config):
    """AdamW; beside a bf16 parameter it keeps 12 bytes by default, 4.06 with "fp8" and "remainder".

    Args:
        state_dtype: of the moments: "fp32" (8 bytes a parameter), "bf16" (4) or "fp8" (2.06).
        master_weights: of bf16 parameters: "fp32" (4 bytes), "remainder" (2; with the parameter the same master, bit
            for bit) or "none" (0; the parameter is rounded stochastically).
        max_grad_norm: 0 turns clipping off.
    """

    lr: PositiveFloat = 3e-3
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    max_grad_norm: NonNegativeFloat = 1.0
    state_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    master_weights: Literal["fp32", "remainder", "none"] = "fp32"
