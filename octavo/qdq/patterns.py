"""A small matcher of spelled-out formulas: nested Ops, Vars and Nums; casts between them are looked through."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from octavo.qdq.graph import Rewriter, argument, arguments, aten, is_call, val_of

Bindings = dict[str, Any]
CASTS = (aten.to.dtype, aten._to_copy.default)
_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TOLERANCE = 4e-3  # a formula's constants may have been stored in bf16


@dataclasses.dataclass(frozen=True)
class Var:
    """Any node, the same one wherever the name stands again (casts aside)."""

    name: str


@dataclasses.dataclass(frozen=True)
class Num:
    """A number, or a constant of one element: this value, or any that is then bound to `name`."""

    value: float | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Op:
    """A call of one of `targets` with these first arguments, in either order where it commutes."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    commutes: bool = False


@dataclasses.dataclass(frozen=True)
class Either:
    """The first of several patterns that fits."""

    options: tuple[Any, ...]


def mul(a: Any, b: Any) -> Op:
    """a * b, also as a division by 1 / b where b is a Num."""
    return Op((aten.mul.Tensor, aten.mul.Scalar), (a, b), commutes=True)


def add(a: Any, b: Any) -> Op:
    """a + b."""
    return Op((aten.add.Tensor, aten.add.Scalar), (a, b), commutes=True)


def div(a: Any, b: Any) -> Op:
    """a / b."""
    return Op((aten.div.Tensor, aten.div.Scalar), (a, b))


def power(a: Any, exponent: float) -> Either:
    """a ** exponent, also as a product of itself."""
    calls: list[Any] = [Op((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor), (a, Num(exponent)))]
    if exponent == 2:
        calls += [mul(a, a), Op((aten.square.default,), (a,))]
    if exponent == 3:
        calls += [mul(a, mul(a, a)), mul(a, power(a, 2))]
    return Either(tuple(calls))


def skip_casts(node: Any) -> Any:
    """The node in front of casts between wide floating-point dtypes; one to FP8 is a quantization."""
    while is_call(node, *CASTS) and _is_wide_cast(node):
        node = argument(node, 0)
    return node


def match(rewriter: Rewriter, pattern: Any, node: Any) -> Bindings | None:
    """What a pattern's names are bound to where it describes a node, else None."""
    return next(_matches(rewriter, pattern, node, {}), None)


def _matches(rewriter: Rewriter, pattern: Any, node: Any, found: Bindings) -> Iterator[Bindings]:
    if isinstance(node, Node) and node in rewriter.overwritten:
        return
    if isinstance(pattern, Either):
        for option in pattern.options:
            yield from _matches(rewriter, option, node, found)
    elif isinstance(pattern, Num):
        yield from _number(rewriter, pattern, node, found)
    elif isinstance(pattern, Var):
        yield from _variable(pattern, node, found)
    elif is_call(skip_casts(node), *pattern.targets) and argument(skip_casts(node), 2, "alpha", 1) == 1:
        args = arguments(skip_casts(node))
        orders = [args[: len(pattern.args)]] + ([args[1::-1]] if pattern.commutes else [])
        for order in orders:
            if len(order) == len(pattern.args):
                yield from _all(rewriter, pattern.args, order, found)


def _all(rewriter: Rewriter, patterns: tuple[Any, ...], nodes: Any, found: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield found
        return
    for bound in _matches(rewriter, patterns[0], nodes[0], found):
        yield from _all(rewriter, patterns[1:], nodes[1:], bound)


def _variable(pattern: Var, node: Any, found: Bindings) -> Iterator[Bindings]:
    if not isinstance(node, Node):
        return
    node = skip_casts(node)
    if found.get(pattern.name, node) is node:
        yield {**found, pattern.name: node}


def _number(rewriter: Rewriter, pattern: Num, node: Any, found: Bindings) -> Iterator[Bindings]:
    value = node
    if isinstance(node, Node):
        constant = rewriter.value(node)
        if constant is None or constant.numel() != 1:
            return
        value = float(constant)
    if not isinstance(value, int | float):
        return
    if pattern.value is not None and abs(value - pattern.value) > _TOLERANCE * abs(pattern.value):
        return
    yield {**found, pattern.name: float(value)} if pattern.name else found


def _is_wide_cast(node: Node) -> bool:
    source = argument(node, 0)
    dtypes = (argument(node, 1, "dtype"), val_of(source).dtype) if isinstance(source, Node) else ()
    return bool(dtypes) and all(dtype in _WIDE for dtype in dtypes)
