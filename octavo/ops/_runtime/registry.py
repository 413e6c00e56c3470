"""Registers octavo's ops with torch.library: schema, CPU and CUDA implementations, and a fake for torch.compile."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("octavo", "DEF")
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_implementations: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # op -> on a GPU, on a CPU


def register(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any],
    has_gradient: bool = True,
) -> Any:
    """Define `octavo::NAME` and return a callable for it.

    Args:
        schema: "name(Tensor x, ...) -> Tensor", without the namespace.
        reference: the torch implementation, which is the CPU path.
        cuda: the GPU implementation.
        fake: shapes and dtypes only.
        has_gradient: False for an op on state, which no autograd follows.
    Returns:
        A function of the op's positional arguments. It goes through the dispatcher wherever somebody could be looking
        (a compiler, autograd, fake tensors, a subclass), and else straight to the implementation: at some 30 us a
        dispatch of a Python op, a small linear would spend half its time there.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.octavo, name).default
    _implementations[op] = cuda, reference

    def call(x: torch.Tensor, *rest: Any) -> Any:
        if not is_unwatched(x, has_gradient):
            return op(x, *rest)
        return (cuda if x.is_cuda else reference)(x, *rest)

    return call


def implementation_of(op: Any, x: Any) -> Callable[..., Any] | None:
    """What one of octavo's ops calls for its first argument; None for any other op."""
    found = _implementations.get(op)
    return None if found is None else found[0 if x.is_cuda else 1]


def is_unwatched(x: torch.Tensor, has_gradient: bool = True) -> bool:
    """Whether a call on x needs no dispatcher: no compiler, autograd, fake tensors or subclass would see it."""
    if torch.compiler.is_compiling():
        return False
    is_known = type(x) in _PLAIN_TYPES and (x.is_cuda or x.is_cpu)
    return is_known and not (has_gradient and torch.is_grad_enabled()) and torch._C._len_torch_dispatch_stack() == 0
