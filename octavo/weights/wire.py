"""Weights over HTTP, both ends: a manifest, then the tensors' bytes in buckets; and a small tensor as JSON fields."""

import base64
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from octavo.weights.errors import EngineAnswerError
from octavo.weights.manifest import TensorSpec, raw_bytes, tensor_sha256
from octavo.weights.update import WeightUpdate


def manifest_json(tensors: Mapping[str, torch.Tensor], checksums: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The manifest that an upload begins with.

    Args:
        checksums: of all tensors.
    """
    return {
        name: {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape), "sha256": checksums[name]}
        for name, tensor in tensors.items()
    }


def buckets(tensors: Mapping[str, torch.Tensor], size: int) -> Iterator[bytes]:
    """The tensors' bytes one after the other, in pieces of `size`, the last maybe smaller."""
    waiting = bytearray()
    for tensor in tensors.values():
        flat = raw_bytes(tensor)
        for start in range(0, len(flat), size):
            waiting += flat[start : start + size]
            while len(waiting) >= size:
                yield bytes(waiting[:size])
                del waiting[:size]
    if waiting:
        yield bytes(waiting)


class Upload:
    """The bytes of a manifest's tensors, one tensor after the other in the manifest's order.

    Args:
        update: takes each tensor when its last byte has come.

    Attributes:
        num_received: bytes so far.
        num_bytes: of all tensors.
    """

    def __init__(self, update: WeightUpdate, manifest: Mapping[str, TensorSpec]) -> None:
        self.update = update
        self.num_received = 0
        self.num_bytes = sum(spec.num_bytes for spec in manifest.values())
        self._rest = iter([(name, spec) for name, spec in manifest.items() if spec.num_bytes])
        self._name, self._spec = "", TensorSpec(torch.uint8, (0,))
        self._buffer, self._num_filled = torch.empty(0, dtype=torch.uint8), 0

    @property
    def progress(self) -> dict[str, int]:
        """What a sender is told."""
        return {"received": self.num_received, "num_bytes": self.num_bytes}

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            CheckpointError: a tensor is bad, and with it the update.
        """
        rest = memoryview(data)
        while rest:
            if self._num_filled == len(self._buffer):
                self._name, self._spec = next(self._rest)
                self._buffer, self._num_filled = torch.empty(self._spec.num_bytes, dtype=torch.uint8), 0
            part = rest[: len(self._buffer) - self._num_filled]
            end = self._num_filled + len(part)
            self._buffer.numpy().data[self._num_filled : end] = part
            self._num_filled, rest = end, rest[len(part) :]
            self.num_received += len(part)
            if end == len(self._buffer):
                self.update.stage(self._name, self._buffer.view(self._spec.dtype).view(self._spec.shape))


def field(answer: Any, *path: str | int) -> Any:
    """A value deep in an answer.

    Raises:
        EngineAnswerError: there is none.
    """
    value = answer
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            where = ".".join(map(str, path))
            raise EngineAnswerError(f"the answer has no {where}; got {str(answer)[:200]}") from None
    return value


def tensor_json(tensor: torch.Tensor) -> dict[str, Any]:
    """The fields of a small tensor, on any device.

    Returns:
        "dtype" (torch's name), "shape", and "data": base64 of the elements in row-major order, as safetensors has them.
    """
    data = base64.b64encode(raw_bytes(tensor)).decode("ascii")
    return {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape), "data": data}


def read_tensor(fields: Any, dtypes: Collection[torch.dtype], where: str) -> torch.Tensor:
    """The tensor that tensor_json wrote, in memory of its own.

    Args:
        fields: with "sha256" where the sender has it.
        dtypes: that it may have.
        where: for messages.
    Raises:
        EngineAnswerError: fields that are missing or do not fit each other, or bytes that are not those of the SHA-256.
    """
    try:
        name, shape, raw = fields["dtype"], list(fields["shape"]), base64.b64decode(fields["data"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswerError(f"{where}: no tensor of dtype, shape and base64 ({error!r}): {fields!r:.80}") from None
    dtype = next((d for d in dtypes if _name_of(d) == name), None)
    if dtype is None or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise EngineAnswerError(f"{where}: a tensor of {name!r} {shape!r:.80}; {sorted(map(str, dtypes))} are read")
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise EngineAnswerError(
            f"{where}: {len(raw)} bytes came for {name} {shape}; they were cut, or are of another tensor"
        )
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
    if fields.get("sha256", "") not in ("", tensor_sha256(tensor)):
        raise EngineAnswerError(f"{where}: the bytes do not have their SHA-256; they were damaged on the way")
    return tensor


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
