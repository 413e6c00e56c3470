"""save_model: a Decoder as a Hugging Face checkpoint, in high precision or as FP8 codes, written whole or not."""

import json
from pathlib import Path

import torch

from octavo.distributed.outcome import everyone
from octavo.errors import CheckpointError, ConfigError
from octavo.models.checkpoint import fp8_block, kv_scales, record, scaled_weight
from octavo.models.checkpoint.atomic import atomic_directory
from octavo.models.checkpoint.dialects import CONFIG_FILE, DIALECTS, WRITABLE, make_config
from octavo.models.checkpoint.layout import Layout
from octavo.models.checkpoint.names import ParameterNames, never_quantized, parameter_names
from octavo.models.checkpoint.safetensors_io import MAX_SHARD_BYTES, write_tensors
from octavo.models.decoder import Decoder
from octavo.models.export import ModelExport, has_dtensors, high_precision_linears, reshard, weight_of
from octavo.models.tokenizer import Tokenizer
from octavo.nn import Linear, fp8_state_dict
from octavo.nn.conversion import require_module
from octavo.nn.weights.delayed import DelayedState
from octavo.numerics import QuantizedTensor, Scaling
from octavo.numerics.scaling import reciprocal
from octavo.ops.quantize import quantize


def save_model(
    model: Decoder,
    path: str | Path,
    dialect: str = "bf16",
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, safetensors files, the tokenizer, and a folder `octavo/` with the model's numerics.

    Of a model that octavo.parallel.shard has sharded, or parallelize cut, every rank writes its own rows and columns,
    as dialect "bf16": all ranks call this, with one path on a file system that they share.

    Args:
        path: the checkpoint directory to make. It may exist if it is empty or if octavo wrote it, and is then
            replaced as a whole, without a question; a failure or a kill leaves what was there before.
        dialect: "bf16": every weight in the model's own dtype. The others hold the linears as E4M3 codes; linears
            that the model's recipe keeps in high precision stay in bf16 and are listed in the config.
            "fp8-block", "compressed-tensors-block": 128 x 128 scales; linears of which a part's sizes are no multiples
            of 128 stay in bf16 too, because other readers have no ragged blocks. "fp8-tensor-dynamic": one scale a
            weight. "fp8-tensor-static", "compressed-tensors-tensor": one scale a weight and one a linear's input.
            "compressed-tensors-channel": one scale a row.
        tokenizer: written beside the weights; without one the checkpoint takes token ids alone.
        max_shard_bytes: larger checkpoints are written as shards with an index.
    Raises:
        CheckpointError: an unknown dialect, a path that is taken, a weight that is not finite, codes that the dialect
            cannot hold, an input without a known scale. Nothing is written.
        ConfigError: what is no model of octavo.models, or the architecture does not fit its family's config.json.
    Exactness: codes and scales are those that the model computes with under a recipe with these scales, or holds.
    """
    require_module(model, "save_model")
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"save_model writes octavo's own models, got a {type(model).__name__}; save it as you do without octavo "
            "(its state dict has the usual keys), and octavo.load_model reads that checkpoint"
        )
    if dialect not in DIALECTS:
        raise CheckpointError(f"dialect must be one of {', '.join(DIALECTS)}, got {dialect!r}")
    reshard(model)
    if model.tensor_group is not None or has_dtensors(model):
        if dialect != "bf16":
            raise ConfigError(
                f"a sharded or cut model is written as 'bf16', got dialect={dialect!r}; write that, and quantize it in "
                "one process (octavo quantize)"
            )
        ModelExport(model, tokenizer, max_shard_bytes=max_shard_bytes).write(path, group=everyone())
        return
    layout = _layout(dialect, model)
    fields = {**model.config.to_hf(), "torch_dtype": str(model.dtype).removeprefix("torch.")}
    high_precision = high_precision_linears(model)
    tensors, skipped = checkpoint_tensors(model, dialect)
    if layout.weight is not None:
        fields["quantization_config"] = make_config(layout, skipped, kv_scales.strategy(model.kv_scales))
        fields["torch_dtype"] = "bfloat16"
    with atomic_directory(path, may_replace=record.is_ours) as directory:
        (directory / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        write_tensors(directory, tensors, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(directory)
        record.write(directory, model.numerics, high_precision, model.weight_version, fp8_state_dict(model))


def checkpoint_tensors(model: Decoder, dialect: str = "bf16") -> tuple[dict[str, torch.Tensor], list[str]]:
    """What save_model writes: the tensors by Hugging Face's names, and the linears that stay in high precision.

    Tensors share the model's storage where they are its own values. Errors as save_model.
    """
    layout, high_precision = _layout(dialect, model), high_precision_linears(model)
    tensors: dict[str, torch.Tensor] = {}
    skipped = never_quantized(model.config)
    parameters = parameter_names(model.config)
    for parameter in parameters:
        written, quantized = _parameter_tensors(model, parameter, layout, high_precision)
        tensors |= written
        if parameter.is_linear_weight and not quantized:
            skipped += [name.removesuffix(".weight") for name, _ in parameter.parts]
    tensors |= kv_scales.write(model.kv_scales, kv_scales.attention_modules(parameters))
    return tensors, skipped


def _layout(dialect: str, model: Decoder) -> Layout:
    """The dialect's layout, with power-of-two scales where the model has such."""
    weight = model.numerics.recipe.weight
    is_e8m0 = weight is not None and weight.scale_format == "e8m0"
    return fp8_block.UE8M0 if dialect == fp8_block.LAYOUT.dialect and is_e8m0 else WRITABLE[dialect]


def _parameter_tensors(
    model: Decoder, parameter: ParameterNames, layout: Layout, high_precision: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], bool]:
    """The file's tensors of one parameter, and whether they are codes."""
    linear_name = parameter.name.removesuffix(".weight")
    if layout.weight is None or linear_name in high_precision or not _fits_dialect(parameter, layout):
        dtype = model.dtype if layout.weight is None else torch.bfloat16
        return {name: part.to(dtype) for name, part in parameter.split(weight_of(model, parameter)).items()}, False
    linear = model.get_submodule(linear_name)
    assert isinstance(linear, Linear), linear_name
    codes = written_codes(linear_name, linear, parameter, layout.weight)
    input_scale = _input_scale(linear_name, linear) if layout.input == "static" else None
    written: dict[str, torch.Tensor] = {}
    for name, part in codes.items():
        written |= scaled_weight.write(name, part, input_scale, layout)
    return written, True


def _fits_dialect(parameter: ParameterNames, layout: Layout) -> bool:
    """Whether a parameter is a linear's weight that the dialect's blocks fit."""
    is_block = layout.weight is not None and layout.weight.kind == "block_128x128"
    return parameter.is_linear_weight and (not is_block or fp8_block.can_quantize(parameter.part_shapes.values()))


def written_codes(
    linear_name: str, linear: Linear, parameter: ParameterNames, scaling: Scaling
) -> dict[str, QuantizedTensor]:
    """The linear's codes a part: those it computes with if the scaling has room for them, else made from its value.

    Raises:
        CheckpointError: the linear holds codes alone, of another scaling: others would be rounded twice.
    """
    recipe = linear.recipe
    if linear.weight is None or (recipe is not None and recipe.weight == scaling):
        held = parameter.split_codes(linear.quantized_weight(recipe))
        fitted = {name: fit for name, part in held.items() if (fit := scaled_weight.fit(part, scaling)) is not None}
        if len(fitted) == len(held):
            return fitted
        kind = next(iter(held.values())).scaling.kind
        raise CheckpointError(
            f"{linear_name} holds {kind} codes alone, and this dialect has {scaling.kind} scales: others would be "
            "rounded twice; load the checkpoint with trainable=True first, or write a dialect with its scales"
        )
    source = linear.weight.detach().to(torch.bfloat16)
    names = [name for name, _ in parameter.parts]
    parts = [quantize(part, scaling) for part in source.split(list(linear.parts))]
    return dict(zip(names, parts, strict=True))


def _input_scale(linear_name: str, linear: Linear) -> torch.Tensor:
    """[1] fp32: the linear's known input scale, or delayed scaling's.

    Raises:
        CheckpointError: there is none.
    """
    if linear.input_scale is not None:
        return linear.input_scale
    recipe = linear.recipe
    if recipe is not None and recipe.has_state:
        state = linear.delayed_state(recipe)
        quant_scale = state.quant_scale[DelayedState.INPUT].reshape(1)
        if quant_scale.item() != 1.0 or state.history[:, DelayedState.INPUT].any():
            return reciprocal(quant_scale)
    raise CheckpointError(
        f"{linear_name} has no known input scale, which a static dialect stores; calibrate the model first "
        "(Linear.set_input_scale), or write fp8-tensor-dynamic"
    )
