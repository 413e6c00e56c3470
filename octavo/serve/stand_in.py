"""A stand-in for a checkpoint: few layers of its shapes under its numerics, so that it launches the kernels of all."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.models import Decoder, ModelConfig
from octavo.models.checkpoint.dialects import read_config
from octavo.models.checkpoint.names import parameter_names
from octavo.nn import Linear, pin_codes
from octavo.numerics import Numerics
from octavo.serve.model_choice import numerics_asked

_STEP_BYTES = 8 << 30  # of activations, in a few threads


def build_stand_in(path: Path, asked: dict[str, Any], device: torch.device) -> Decoder:
    """A model that computes as one loaded from the checkpoint, of weights that are zero; no tensor is read.

    Args:
        asked: load_for_inference's arguments.
    Raises:
        CheckpointError: no config.json that octavo reads.
        RecipeError: see octavo.Numerics.
    """
    fields = read_config(path)
    numerics = numerics_asked(path, asked)
    is_fp32 = "float32" in (fields.get("dtype"), fields.get("torch_dtype"))
    dtype = asked["dtype"] or (torch.float32 if is_fp32 else torch.bfloat16)
    return stand_in_of(ModelConfig.from_hf(fields), numerics, dtype, device)


@torch.no_grad()
def stand_in_of(config: ModelConfig, numerics: Numerics, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The same for an architecture under numerics, of a checkpoint or not; config has all its layers."""
    config, recipe = few_layers(config), numerics.recipe
    needs_values = recipe.has_state or recipe.is_emulated or recipe.high_precision_gemms
    model = Decoder(config, dtype=dtype, device="meta")
    zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
    shared = functools.cache(zeros)  # by embedding and head, which are the largest
    for parameter in parameter_names(config):
        module_name, _, leaf = parameter.name.rpartition(".")
        module = model.get_submodule(module_name)
        value = (zeros if parameter.is_linear_weight else shared)(parameter.shape)
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        if parameter.is_linear_weight and recipe.is_fp8:
            assert isinstance(module, Linear), parameter.name
            if recipe.static_input:
                module.set_input_scale(torch.ones(1))
            if not needs_values:
                module.keep_codes_only(recipe)
    model.to(device)
    model.set_numerics(numerics)
    if model.kv_table is not None:
        model.kv_table.end_calibration(model.weight_version)  # with scales of 1
    pin_codes(model)
    return model


def has_room(path: Path, asked: dict[str, Any], free_bytes: int) -> bool:
    """Whether memory is left for a stand-in and its steps where the checkpoint's weights will take theirs."""
    config = ModelConfig.from_hf(read_config(path))
    numerics = numerics_asked(path, asked)
    hp_bytes = 4 if asked["dtype"] == torch.float32 else 2
    num_outer = 2 * config.vocab_size * config.hidden_size
    linear_bytes = 1.05 if numerics.recipe.is_fp8 else hp_bytes  # codes and scales
    weights = linear_bytes * config.num_params + hp_bytes * num_outer
    return has_room_beside(config, hp_bytes, free_bytes - int(weights))


def has_room_beside(config: ModelConfig, hp_bytes: int, free_bytes: int) -> bool:
    """Whether a stand-in and its steps fit into so much memory."""
    return free_bytes > hp_bytes * few_layers(config).num_params + _STEP_BYTES


def few_layers(config: ModelConfig) -> ModelConfig:
    """The same architecture up to the first layer of each kind: with experts, and without."""
    kinds = [config.has_experts(i) for i in range(config.num_layers)]
    num_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
    mlp_only = tuple(i for i in config.mlp_only_layers if i < num_layers)
    return dataclasses.replace(config, num_layers=num_layers, mlp_only_layers=mlp_only)
