"""The block dialect of DeepSeek and Qwen (transformers' FineGrainedFP8): E4M3 codes and `weight_scale_inv`, 128 x 128.

`weight_scale_inv` is a decode scale in spite of its name: weight ~= codes * weight_scale_inv. Activations are
quantized 1 x 128 at run time, so no scale of theirs is stored.
"""

from collections.abc import Iterable
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import bf16
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.numerics import QuantizedTensor, Scaling

QUANT_METHOD = "fp8"
SCALING = Scaling.block_128x128(torch.float8_e4m3fn)
BLOCK = 128
# What config.json's quantization_config may say; another value means codes that would be misread.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", None),
    "modules_to_convert": (None, []),
    "expert_dtype": ("fp8", None),
}


def scale_name(weight_name: str) -> str:
    """Name of the scale that goes with a weight."""
    return f"{weight_name}_scale_inv"


def check_config(quantization: dict[str, Any]) -> None:
    """Refuse a quantization_config that is not this dialect.

    Raises:
        CheckpointError: naming the field.
    """
    for field, supported in _SUPPORTED.items():
        value = quantization.get(field, supported[0] if len(supported) > 1 else None)
        if (list(value) if isinstance(value, tuple) else value) not in supported:
            raise CheckpointError(
                f"config.json: quantization_config.{field} = {value!r} is not supported; fp8-block has {supported[0]!r}"
            )


def make_config(skipped: Iterable[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint in this dialect.

    Args:
        skipped: Hugging Face names of the linears that stay in high precision.
    """
    return {
        "quant_method": QUANT_METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(skipped),
    }


def read(reader: SafetensorsReader, name: str, shape: tuple[int, ...]) -> torch.Tensor | QuantizedTensor:
    """Read one weight: codes with their scale, or a tensor in high precision where the file left it so.

    Returns:
        QuantizedTensor [N, K] with block_128x128 scales, or [shape] bf16, fp16 or fp32; on the CPU.
    Raises:
        CheckpointError: a missing tensor, codes without a scale, a scale of another shape or dtype or not finite, a
            scale without codes.
    """
    bf16.check_shape(reader, name, shape)
    scale = scale_name(name)
    if reader.entries[name].dtype != SCALING.dtype:
        if scale in reader.entries:
            raise CheckpointError(
                f"{reader.path}: {scale} comes with {name}, which is {reader.entries[name].dtype}; only "
                f"{SCALING.dtype} codes have a scale"
            )
        return bf16.read(reader, name, shape)
    if scale not in reader.entries:
        raise CheckpointError(f"{reader.path}: {name} holds FP8 codes, but its scale {scale} is missing")
    expected = SCALING.scale_shape(*shape)
    entry = reader.entries[scale]
    if entry.shape != expected:
        raise CheckpointError(
            f"{reader.path}: {scale} has shape {entry.shape}; {name} {shape} in blocks of 128 x 128 needs {expected}"
        )
    if entry.dtype != torch.float32:
        raise CheckpointError(f"{reader.path}: {scale} is {entry.dtype}; fp8-block scales are float32")
    scales = reader.load(scale)
    if (scales < 0).any():
        raise CheckpointError(f"{reader.path}: {scale} holds a negative scale")
    return QuantizedTensor(reader.load(name), scales, SCALING)


def can_quantize(shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether a linear's parts may all be written as codes: transformers leaves ragged blocks in high precision."""
    return all(rows % BLOCK == 0 and cols % BLOCK == 0 for rows, cols in shapes)


def write(name: str, codes: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The file's tensors of one weight: its codes and its scale."""
    assert codes.scaling.kind == SCALING.kind and codes.scaling.dtype == SCALING.dtype, codes.scaling
    return {name: codes.qdata, scale_name(name): codes.scale}
