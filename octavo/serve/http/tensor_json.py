"""A small tensor within a JSON answer: dtype, shape, and its raw little-endian bytes in base64."""

import base64
from typing import Any

import torch


def tensor_json(tensor: torch.Tensor) -> dict[str, Any]:
    """The fields of a tensor.

    Args:
        tensor: on any device.
    Returns:
        "dtype" (torch's name), "shape", and "data": base64 of the elements in row-major order, as safetensors has them.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(flat.numpy().data).decode("ascii"),
    }
