"""A small tensor out of a server's JSON answer: dtype, shape, base64 of its bytes, and their SHA-256 where there is."""

import base64
import math
from collections.abc import Collection
from typing import Any

import torch

from octavo.weights.errors import EngineAnswerError
from octavo.weights.update import tensor_sha256


def read_tensor(fields: Any, dtypes: Collection[torch.dtype], where: str) -> torch.Tensor:
    """The tensor, in memory of its own.

    Args:
        fields: as octavo's server writes it. dtypes: that it may have. where: for messages.
    Raises:
        EngineAnswerError: fields that are missing or do not fit each other, or bytes that are not those of the SHA-256.
    """
    try:
        name, shape, raw = fields["dtype"], list(fields["shape"]), base64.b64decode(fields["data"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswerError(f"{where}: no tensor of dtype, shape and base64 ({error!r}): {fields!r:.80}") from None
    dtype = next((d for d in dtypes if str(d) == f"torch.{name}"), None)
    if dtype is None or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise EngineAnswerError(f"{where}: a tensor of {name!r} {shape!r:.80}; {sorted(map(str, dtypes))} are read")
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise EngineAnswerError(f"{where}: {len(raw)} bytes came for {name} {shape}; they were cut or belong elsewhere")
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
    if fields.get("sha256", "") not in ("", tensor_sha256(tensor)):
        raise EngineAnswerError(f"{where}: the bytes do not have their SHA-256; they were damaged on the way")
    return tensor
