"""Registers octavo's ops with torch.library, and calls their implementations past it where nothing looks on."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor

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
    """Define `octavo::NAME` and return a callable for it: `bypassing` of the op and its implementations.

    The op has no gradient: an autograd Function of octavo.nn.functional calls it, and the op of its backward.

    Args:
        schema: "name(Tensor x, ...) -> Tensor", without the namespace.
        reference: the torch implementation, which is the CPU path.
        cuda: the GPU implementation.
        fake: shapes and dtypes only.
        has_gradient: False for an op on state, which no autograd follows.
    """
    op = define(schema, reference=reference, fake=fake, cuda=cuda)
    return bypassing(schema.split("(", 1)[0], op, reference=reference, cuda=cuda, has_gradient=has_gradient)


def define(
    schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any], cuda: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Define `octavo::NAME`; arguments as in register."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    op: torch._ops.OpOverload = getattr(torch.ops.octavo, name).default
    _implementations[op] = cuda, reference
    return op


def kernel_or_reference(
    place: str, reference: Callable[..., Any], takes: Callable[[torch.Tensor], bool] | None = None
) -> Callable[..., Any]:
    """An op's implementation on a GPU: a launcher whose module is imported at the first call, or the reference.

    Args:
        place: of the launcher under octavo.ops, such as "activation.swiglu.triton.swiglu".
        reference: what runs where OCTAVO_FORCE_REFERENCE asks for it, or the kernel does not take the first argument.
        takes: whether it does; None where it always does.
    """
    module, _, name = place.rpartition(".")
    kernels = functools.cache(lambda: importlib.import_module(f"octavo.ops.{module}"))

    def run(x: torch.Tensor, *rest: Any) -> Any:
        if env.force_reference() or (takes is not None and not takes(x)):
            return reference(x, *rest)
        return getattr(kernels(), name)(x, *rest)

    run.__qualname__ = place
    return run


def bypassing(
    name: str,
    dispatched: Callable[..., Any],
    *,
    reference: Callable[..., Any],
    cuda: Callable[..., Any],
    has_gradient: bool = True,
) -> Callable[..., Any]:
    """A function that runs an op's implementation itself wherever it can_bypass_dispatcher, and else `dispatched`.

    A dispatch of a Python op takes some 30 us: a small linear would spend half its time there. A profiler sees the
    direct call, too, as a range `octavo::NAME`.

    Args:
        dispatched: its first argument is a tensor or a QuantizedTensor.
        reference: takes the same arguments.
        cuda: takes the same arguments.
    """
    label = f"octavo::{name}"

    def call(x: Any, *rest: Any) -> Any:
        tensor = x.qdata if type(x) is QuantizedTensor else x
        if not can_bypass_dispatcher(tensor, has_gradient):
            return dispatched(x, *rest)
        run = cuda if tensor.is_cuda else reference
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function(label):
                return run(x, *rest)
        return run(x, *rest)

    return call


def can_bypass_dispatcher(x: torch.Tensor, has_gradient: bool = True) -> bool:
    """Whether a call on x needs no dispatcher: no compiler, autograd, fake tensors or subclass would see it."""
    if torch.compiler.is_compiling():
        return False
    is_known = type(x) in _PLAIN_TYPES and (x.is_cuda or x.is_cpu)
    return is_known and not (has_gradient and torch.is_grad_enabled()) and torch._C._len_torch_dispatch_stack() == 0


def implementation_of(op: Any, x: Any) -> Callable[..., Any] | None:
    """What one of octavo's ops calls for its first argument; None for any other op."""
    found = _implementations.get(op)
    return None if found is None else found[0 if x.is_cuda else 1]
