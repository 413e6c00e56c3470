"""Reading and editing the graph under rewrite: constants, Q and DQ nodes, new nodes in place of old ones."""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node

from octavo.qdq.report import Report

aten = torch.ops.aten
QUANTIZE = torch.ops.octavo.qdq_quantize.default
QUANTIZE_DYNAMIC = torch.ops.octavo.qdq_quantize_dynamic.default
DEQUANTIZE = torch.ops.octavo.qdq_dequantize.default


@dataclasses.dataclass(frozen=True)
class Quantize:
    """A Q: codes = q(source). `scale` is None where it is dynamic or computed in the graph (`is_dynamic` tells)."""

    node: Node
    source: Node
    scale: torch.Tensor | None
    kind: str
    dtype: torch.dtype
    is_dynamic: bool

    @property
    def is_per_tensor(self) -> bool:
        """One known scale for the whole tensor, which any reshaping keeps."""
        return self.kind == "per_tensor" and self.scale is not None


@dataclasses.dataclass(frozen=True)
class Dequantize:
    """A DQ of `codes`. `scale` is its value where it is constant."""

    node: Node
    codes: Node
    scale_node: Node
    scale: torch.Tensor | None
    kind: str
    out_dtype: torch.dtype


class Rewriter:
    """A GraphModule under rewrite, with the values of its constants and the report.

    Args:
        module: edited in place. Attributes that the graph itself writes to, through views too, are no constants.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module, self.graph, self.report = module, module.graph, Report()
        self._values: dict[Node, torch.Tensor | None] = {}
        self.written = {_base_of(argument(node, 0)) for node in self.graph.nodes if _writes(node)}
        self.overwritten = _overwritten(self.graph.nodes)

    def nodes(self, *targets: Any) -> list[Node]:
        """Calls of these targets in the graph's order; all calls without arguments."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        return [node for node in calls if not targets or node.target in targets]

    def quantizes(self) -> list[Quantize]:
        """Every Q."""
        return [self.quantize(node) for node in self.nodes(QUANTIZE, QUANTIZE_DYNAMIC)]

    def quantize(self, node: Node) -> Quantize:
        """A Q node, read."""
        if node.target is QUANTIZE_DYNAMIC:
            source, kind, dtype = arguments(node)
            return Quantize(node, source, None, kind, dtype, True)
        source, scale, kind, dtype = arguments(node)
        return Quantize(node, source, self.value(scale), kind, dtype, False)

    def dequantize(self, node: Any) -> Dequantize | None:
        """A DQ node, read; None for any other."""
        if not is_call(node, DEQUANTIZE):
            return None
        codes, scale, kind, out_dtype = arguments(node)
        return Dequantize(node, codes, scale, self.value(scale), kind, out_dtype)

    def may_change(self, node: Node) -> bool:
        """Whether a node may be a view of an attribute that the graph writes to: read later, it has other values."""
        return _base_of(node) in self.written

    def value(self, node: Any) -> torch.Tensor | None:
        """What a node computes where it depends on constants alone, else None."""
        if not isinstance(node, Node):
            return None
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            return None if node in self.written else attribute(self.module, str(node.target)).detach()
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return None
        if _writes(node) or torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        known = {source: self.value(source) for source in node.all_input_nodes}
        if any(value is None for value in known.values()):
            return None
        args, kwargs = torch.fx.map_arg((arguments(node), node.kwargs), known.__getitem__)
        with torch.no_grad():
            out = node.target(*args, **kwargs)
        return out if isinstance(out, torch.Tensor) else None

    def add_constant(self, value: torch.Tensor, before: Node) -> Node:
        """A get_attr node of a new buffer."""
        index = sum(1 for name in self.module._buffers if name.startswith("qdq_"))
        name = f"qdq_{index}"
        self.module.register_buffer(name, value)
        with self.graph.inserting_before(before):
            node = self.graph.get_attr(name)
        node.meta["val"] = value
        self._values[node] = value
        return node

    def call(self, before: Node, target: Any, args: tuple[Any, ...], val: Any) -> Node:
        """A new call in front of a node, with its fake value."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        node.meta["val"] = val
        return node

    def call_like(self, node: Node, first: Node) -> Node:
        """A node's call in front of it with another first argument, whose dtype the result has."""
        made, old = first.meta["val"], node.meta["val"]
        if node.target is operator.getitem:
            val = made[argument(node, 1)]
        else:
            val = [part.to(made.dtype) for part in old] if isinstance(old, tuple | list) else old.to(made.dtype)
        call = self.call(node, node.target, (first, *arguments(node)[1:]), val)
        call.kwargs = node.kwargs
        return call

    def item(self, before: Node, source: Node, index: int, val: Any) -> Node:
        """source[index]."""
        return self.call(before, operator.getitem, (source, index), val)

    def replace(self, old: Node, new: Node) -> None:
        """Let every reader of old read new, and drop what has no reader any longer."""
        old.replace_all_uses_with(new)
        self.erase(old)

    def erase(self, node: Node) -> None:
        """Drop a node without readers, and then what it alone read."""
        if node._erased or node.users or node.op not in ("call_function", "get_attr") or _writes(node):
            return
        sources = node.all_input_nodes
        self.graph.erase_node(node)
        for source in sources:
            self.erase(source)


def is_call(node: Any, *targets: Any) -> TypeGuard[Node]:
    """Whether a node calls one of these."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def arguments(node: Any) -> tuple[Any, ...]:
    """A node's positional arguments, of types that the caller knows."""
    args: tuple[Any, ...] = node.args
    return args


def argument(node: Any, index: int, name: str = "", default: Any = None) -> Any:
    """A node's argument by place or name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def val_of(node: Node) -> torch.Tensor:
    """The fake tensor that export recorded for a node."""
    return node.meta["val"]


def attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    """module.a.b.c by its dotted path."""
    parent, _, name = path.rpartition(".")
    value: torch.Tensor = getattr(module.get_submodule(parent), name)
    return value


def same_scale(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two known scales are equal in every bit, whatever shape a single number has."""
    if a is None or b is None:
        return False
    return a.numel() == b.numel() and bool(torch.equal(a.reshape(-1), b.reshape(-1)))


def names(nodes: Iterable[Node]) -> tuple[str, ...]:
    """For the report."""
    return tuple(node.name for node in nodes)


def describe(node: Node) -> str:
    """An op's name for people: aten.gelu, an argument, a constant."""
    if node.op == "placeholder":
        return f"the graph's input {node.name}"
    if node.op == "output":
        return "the graph's output"
    if node.op == "get_attr":
        return f"the constant {node.target}"
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _base_of(node: Any) -> Any:
    """What a node may be a view of, view upon view."""
    while isinstance(node, Node) and node.op == "call_function" and node.args:
        node = node.args[0]
    return node


def _overwritten(nodes: Iterable[Node]) -> set[Node]:
    """Nodes in whose memory the graph writes, through views too: read at another place, they may have other values."""
    base: dict[Node, Node] = {}
    for node in nodes:
        source = node.args[0] if node.args else None
        base[node] = base[source] if isinstance(source, Node) and _is_view(node) else node
    written = {base[argument(node, 0)] for node in base if _writes(node)}
    return {node for node in base if base[node] in written}


def _is_view(node: Node) -> bool:
    """Whether a node's result is, or is a part of, its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
