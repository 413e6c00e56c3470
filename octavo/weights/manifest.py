"""What a sender says of its tensors before they come: names, dtypes, shapes, and the SHA-256 of their bytes."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint.safetensors_io import TensorEntry


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a manifest says of a tensor: dtype, shape, and the SHA-256 of its bytes in hex, None for no check."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse another tensor than the one that was announced.

        Raises:
            CheckpointError: another dtype or shape, or other bytes.
        """
        if (tensor.dtype, tuple(tensor.shape)) != (self.dtype, self.shape):
            raise CheckpointError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but the manifest says {self.dtype} {self.shape}"
            )
        if self.sha256 is not None and tensor_sha256(tensor) != self.sha256.lower():
            raise CheckpointError(f"{name}: the bytes do not have the manifest's SHA-256; they were damaged on the way")


def manifest_of(
    tensors: Mapping[str, torch.Tensor] | Mapping[str, TensorEntry], checksums: Mapping[str, str] | None
) -> dict[str, TensorSpec]:
    """A manifest of each tensor as it is, or as a file's header says it is.

    Args:
        checksums: name -> SHA-256 in hex, of all of them; None for no check.
    Raises:
        CheckpointError: the checksums are of other tensors.
    """
    if checksums is not None and (odd := sorted({*tensors} ^ {*checksums})):
        raise CheckpointError(
            f"checksums must name the tensors that come, no more and no less; {odd[0]} is in one alone"
        )
    known: Mapping[str, str | None] = dict.fromkeys(tensors) if checksums is None else checksums
    return {name: TensorSpec(t.dtype, tuple(t.shape), known[name]) for name, t in tensors.items()}


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements in row-major order, little-endian, as safetensors stores them."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 in hex of a tensor's elements in row-major order, little-endian, as safetensors stores them."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()
