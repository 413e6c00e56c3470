"""Registers octavo's ops with torch.library: schema, CPU and CUDA implementations, and a fake for torch.compile."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("octavo", "DEF")


def register(schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any], cuda: Callable[..., Any]) -> Any:
    """Define `octavo::NAME` and return the callable.

    Args:
        schema: "name(Tensor x, ...) -> Tensor", without the namespace.
        reference: the torch implementation, which is the CPU path.
        cuda: the GPU implementation.
        fake: shapes and dtypes only.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.octavo, name).default
