"""From the shared sections to objects: device, architecture, the watch on the routers."""

import torch

from octavo.models import Decoder
from octavo.models.config import ModelConfig
from octavo.models.device import check_device
from octavo.models.families import FAMILIES
from octavo.nn.router_watch import RouterWatch
from octavo.run.sections import ModelSection


def find_device(name: str) -> torch.device:
    """The device of that name; empty takes a GPU where there is one.

    Raises:
        ConfigError: not a device's name.
        BackendError: this machine has no such device.
    """
    return check_device(name or ("cuda" if torch.cuda.is_available() else "cpu"), "run.device")


def build_model_config(section: ModelSection, vocab_size: int, eos_id: int | None, max_len: int) -> ModelConfig:
    """The architecture that a [model] section describes.

    Args:
        vocab_size: the tokenizer's.
        eos_id: the tokenizer's.
        max_len: the longest sequence, where the section sets no max_position_embeddings.
    """
    return ModelConfig(
        family=section.family,
        vocab_size=vocab_size,
        hidden_size=section.hidden_size,
        intermediate_size=section.intermediate_size,
        num_layers=section.num_hidden_layers,
        num_heads=section.num_attention_heads,
        num_kv_heads=section.num_key_value_heads,
        head_dim=section.head_dim or section.hidden_size // section.num_attention_heads,
        max_position_embeddings=section.max_position_embeddings or max_len,
        rope_theta=section.rope_theta,
        rotary_dim=section.rotary_dim or None,
        num_experts=section.num_experts,
        num_experts_per_tok=section.num_experts_per_tok,
        moe_intermediate_size=section.moe_intermediate_size,
        router_aux_loss_coef=section.router_aux_loss_coef or 0.0,
        tie_word_embeddings=section.tie_word_embeddings,
        eos_token_ids=() if eos_id is None else (eos_id,),
        **FAMILIES[section.family].fixed,
    )


def watch_routers(model: Decoder, section: ModelSection, *, measures: bool = False) -> RouterWatch:
    """The model's routers, with the coefficients of a [model] section.

    Raises:
        ConfigError: a coefficient for a model without experts.
    """
    aux, z = section.router_aux_loss_coef, section.router_z_loss_coef
    return RouterWatch(model, aux_loss_coef=aux, z_loss_coef=z, measures=measures)
