"""save_model: a Decoder as a Hugging Face checkpoint, in high precision or as FP8 codes, written whole or not."""

import json
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import fp8_block, record
from octavo.models.checkpoint.atomic import atomic_directory
from octavo.models.checkpoint.dialects import CONFIG_FILE, DIALECTS
from octavo.models.checkpoint.names import ParameterNames, parameter_names
from octavo.models.checkpoint.safetensors_io import MAX_SHARD_BYTES, write_tensors
from octavo.models.decoder import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.nn import DELAYED_BUFFERS, Linear
from octavo.numerics import QuantizedTensor
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

    Args:
        path: the checkpoint directory to make. It may exist if it is empty or if octavo wrote it, and is then
            replaced as a whole; a failure or a kill leaves what was there before.
        dialect: "bf16": every weight in the model's own dtype. "fp8-block": linears as E4M3 codes with 128 x 128
            scales, made from the weights' bf16 values; linears that the model's recipe keeps in high precision, or
            of which a part's sizes are no multiples of 128 (transformers reads no ragged blocks), stay in bf16 and
            are listed in modules_to_not_convert.
        tokenizer: written beside the weights.
        max_shard_bytes: larger checkpoints are written as shards with an index.
    Raises:
        CheckpointError: an unknown dialect, a path that is taken, a weight that is not finite. Nothing is written.
        ConfigError: the architecture does not fit its family's config.json.
    Exactness: codes and scales are those that the model computes with under the recipe "blockwise".
    """
    if dialect not in DIALECTS:
        raise CheckpointError(f"dialect must be one of {', '.join(DIALECTS)}, got {dialect!r}")
    fields = {**model.config.to_hf(), "torch_dtype": str(model.dtype).removeprefix("torch.")}
    high_precision = _high_precision_linears(model)
    tensors: dict[str, torch.Tensor] = {}
    skipped = ["lm_head"]
    for parameter in parameter_names(model.config):
        written, quantized = _parameter_tensors(model, parameter, dialect, high_precision)
        tensors |= written
        if parameter.is_linear_weight and not quantized:
            skipped += [name.removesuffix(".weight") for name, _ in parameter.parts]
    if dialect == "fp8-block":
        fields["quantization_config"] = fp8_block.make_config(skipped)
        fields["torch_dtype"] = "bfloat16"
    state = {k: v for k, v in model.state_dict().items() if k.endswith(DELAYED_BUFFERS)}
    with atomic_directory(path, may_replace=record.is_ours) as directory:
        (directory / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        write_tensors(directory, tensors, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(directory)
        record.write(directory, model.numerics, high_precision, model.weight_version, state)


def _high_precision_linears(model: Decoder) -> tuple[str, ...]:
    """Linears that the model's FP8 recipe leaves out; none where the recipe is high precision (then all may go)."""
    if model.conversion_report is None or not model.numerics.recipe.is_fp8:
        return ()
    return tuple(row.name for row in model.conversion_report.rows if row.recipe is None)


def _parameter_tensors(
    model: Decoder, parameter: ParameterNames, dialect: str, high_precision: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], bool]:
    """The file's tensors of one parameter, and whether they are codes."""
    linear_name = parameter.name.removesuffix(".weight")
    is_quantized = (
        dialect == "fp8-block"
        and parameter.is_linear_weight
        and linear_name not in high_precision
        and fp8_block.can_quantize(parameter.part_shapes.values())
    )
    if not is_quantized:
        dtype = torch.bfloat16 if dialect == "fp8-block" else model.dtype
        return {name: part.to(dtype) for name, part in parameter.split(_weight(model, parameter)).items()}, False
    linear = model.get_submodule(linear_name)
    assert isinstance(linear, Linear), linear_name
    codes = parameter.split_codes(_block_codes(linear))
    return {k: v for name, part in codes.items() for k, v in fp8_block.write(name, part).items()}, True


def _weight(model: Decoder, parameter: ParameterNames) -> torch.Tensor:
    """A parameter in high precision, decoded where the model holds codes only."""
    module = model.get_submodule(parameter.name.rpartition(".")[0])
    if parameter.is_linear_weight and isinstance(module, Linear) and module.weight is None:
        return torch.cat([q.dequantize(model.dtype) for q in module.quantized_weight(module.recipe)])
    return model.get_parameter(parameter.name).detach()


def _block_codes(linear: Linear) -> list[QuantizedTensor]:
    """The linear's 128 x 128 codes: those it computes with if it has such, else made from its bf16 value."""
    recipe = linear.recipe
    if linear.weight is None or (recipe is not None and recipe.weight == fp8_block.SCALING):
        return linear.quantized_weight(recipe)
    source = linear.weight.detach().to(torch.bfloat16)
    return [quantize(part, fp8_block.SCALING) for part in source.split(list(linear.parts))]
