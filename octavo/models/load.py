"""load_model: a Decoder from a checkpoint directory, or a new one from a ModelConfig, under given numerics."""

import warnings
from collections.abc import Collection
from pathlib import Path

import torch

from octavo.models.checkpoint import fp8_block, record
from octavo.models.checkpoint.names import ParameterNames, parameter_names
from octavo.models.checkpoint.stored import Part, StoredWeights, read_stored
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.initial import initial_weights
from octavo.nn import Linear
from octavo.numerics import Numerics, QuantizedTensor, Recipe, get_recipe


def load_model(
    path_or_config: str | Path | ModelConfig,
    *,
    device: torch.device | str = "cpu",
    recipe: Recipe | str = "bf16",
    kv_cache_dtype: str = "bf16",
    exact: bool = False,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    trainable: bool = False,
    allow_unused: Collection[str] = (),
    allow_missing: Collection[str] = (),
) -> Decoder:
    """Load a checkpoint, or make a new model.

    An fp8-block checkpoint under the recipe "blockwise" keeps the file's very codes, which are then all that its
    linears hold: such a model samples and scores, and none of its parameters takes a gradient. With trainable=True,
    or under another recipe, the codes are decoded to dtype, with a warning. Under an FP8 recipe, linears that the
    checkpoint was written to keep in high precision stay so.

    Args:
        path_or_config: a local directory with config.json and safetensors files, or a ModelConfig for random weights.
        recipe, kv_cache_dtype, exact: the model's numerics; see octavo.Numerics.
        dtype: of parameters and activations, torch.bfloat16 or torch.float32; None for the checkpoint's own (fp16
            becomes bf16), bf16 for a new model.
        seed: of the weights of a new model, and of those that allow_missing lets a checkpoint lack.
        trainable: every parameter shall take a gradient.
        allow_unused, allow_missing: Hugging Face names of tensors that may be left over or lacking in the files.
    Returns:
        The model; its conversion_report says what runs in FP8 and why.
    Raises:
        CheckpointError: see octavo.models.checkpoint.stored.read_stored. RecipeError: see octavo.Numerics.
    """
    numerics = Numerics(get_recipe(recipe), kv_cache_dtype, exact)
    if isinstance(path_or_config, ModelConfig):
        model = Decoder(path_or_config, dtype=dtype or torch.bfloat16, device=device, seed=seed)
        model.set_numerics(numerics)
        return model
    path = Path(path_or_config)
    stored = read_stored(path, allow_unused=allow_unused, allow_missing=allow_missing)
    known = record.read(path)
    skip = _high_precision_linears(stored, known) if numerics.recipe.is_fp8 else ()
    model = Decoder(stored.config, dtype=dtype or stored.dtype, device="meta")
    _fill(model, stored, numerics.recipe, skip=skip, seed=seed, trainable=trainable)
    if numerics.recipe.has_state:
        model.load_state_dict(record.read_recipe_state(path), strict=False)
    model.to(device)
    model.set_numerics(numerics, skip=skip)
    model.weight_version = known.weight_version if known else 0
    return model


def _high_precision_linears(stored: StoredWeights, known: record.Record | None) -> tuple[str, ...]:
    """octavo's names of the linears that the checkpoint's author kept out of FP8."""
    if known is not None:
        return known.high_precision
    if stored.dialect == "bf16":
        return ()
    linears = [p.name for p in parameter_names(stored.config) if p.is_linear_weight]
    return tuple(
        name.removesuffix(".weight")
        for name in linears
        if not any(isinstance(part, QuantizedTensor) for part in stored.parts[name])
    )


def _fill(
    model: Decoder, stored: StoredWeights, recipe: Recipe, *, skip: tuple[str, ...], seed: int, trainable: bool
) -> None:
    """Put the stored weights into a model without values."""
    takes_codes = not trainable and recipe.weight == fp8_block.SCALING and not recipe.has_state
    weights, num_decoded = {}, 0
    for parameter in parameter_names(stored.config):
        parts = stored.parts[parameter.name]
        codes = stored.codes(parameter.name)
        linear_name = parameter.name.removesuffix(".weight")
        if codes is not None and takes_codes and linear_name not in skip:
            linear = model.get_submodule(linear_name)
            assert isinstance(linear, Linear), linear_name
            linear.load_quantized(codes)
        else:
            num_decoded += any(isinstance(part, QuantizedTensor) for part in parts)
            weights[parameter.name] = _decode(parameter, parts, model, seed)
    model.load_state_dict(weights, assign=True)
    if num_decoded:
        reason = "training needs parameters" if trainable else f"recipe {recipe.name!r} does not take them as they are"
        warnings.warn(
            f"{num_decoded} FP8 weights of the checkpoint were decoded to {model.dtype}: {reason}", stacklevel=3
        )
    if any(isinstance(module, Linear) and module.weight is None for module in model.modules()):
        model.requires_grad_(False)


def _decode(parameter: ParameterNames, parts: list[Part | None], model: Decoder, seed: int) -> torch.Tensor:
    """A parameter in the model's dtype; what the files lack is initialised."""
    decoded = {}
    for (hf_name, _), part in zip(parameter.parts, parts, strict=True):
        if part is None:
            initial = initial_weights(model.config, dtype=model.dtype, seed=seed)[parameter.name]
            decoded[hf_name] = parameter.split(initial)[hf_name]
        else:
            decoded[hf_name] = (
                part.dequantize(model.dtype) if isinstance(part, QuantizedTensor) else part.to(model.dtype)
            )
    return parameter.merge(decoded)
