"""The high-precision dialect: every tensor as Hugging Face stores it, bf16, fp16 or fp32, without scales."""

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint.safetensors_io import Place, SafetensorsReader

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def read(
    reader: SafetensorsReader,
    name: str,
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    place: Place | None = None,
) -> torch.Tensor:
    """Read one tensor of known shape, or a place of it.

    Returns:
        [shape] bf16, fp16 or fp32.
    Raises:
        CheckpointError: missing, of another shape (another architecture), of another dtype, or not finite.
    """
    check_tensor(reader, name, shape)
    return reader.load(name, device, place)


def check_tensor(reader: SafetensorsReader, name: str, shape: tuple[int, ...]) -> None:
    """Refuse by its header a tensor that is missing, of another shape or of another dtype than these."""
    check_shape(reader, name, shape)
    dtype = reader.entries[name].dtype
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{reader.path}: {name} is {dtype}, which must be bfloat16, float16 or float32 here; an 8-bit tensor needs "
            "a quantization_config in config.json that says how to read it"
        )


def check_shape(reader: SafetensorsReader, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not there or does not fit the architecture."""
    if name not in reader.entries:
        raise CheckpointError(f"{reader.path}: tensor {name} is missing")
    got = reader.entries[name].shape
    if got != shape:
        raise CheckpointError(
            f"{reader.path}: {name} has shape {got}, but config.json asks for {shape}; the weights belong to another "
            "architecture"
        )
