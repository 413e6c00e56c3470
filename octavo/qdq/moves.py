"""Moves of Q and DQ that change no value: Q to producers, DQ to consumers, constants folded, pairs cancelled."""

import operator
from typing import Any

import torch
from torch.fx import Node

from octavo.errors import RecipeError
from octavo.qdq.graph import (
    DEQUANTIZE,
    QUANTIZE,
    QUANTIZE_DYNAMIC,
    Dequantize,
    Quantize,
    Rewriter,
    argument,
    arguments,
    aten,
    describe,
    is_call,
    same_scale,
    val_of,
)

# REARRANGING ops only move or repeat elements of their first argument: one scale for all passes through them.
RESHAPES = (aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default,
            aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)  # fmt: skip
TRANSPOSES = (aten.transpose.int, aten.permute.default, aten.t.default)
REARRANGING = (*RESHAPES, *TRANSPOSES, aten.expand.default)
CUTTING = (aten.slice.Tensor, aten.select.int)  # the same, but some elements may stay behind
SPLITTING = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)
NORMS = (aten.rms_norm.default, aten.layer_norm.default)
_SCALE_LIMIT = 2.0**100  # within, neither a scale nor its reciprocal, nor a decoded bf16 or fp32 value, leaves fp32


def move_pairs(rewriter: Rewriter) -> None:
    """Run every move until none applies."""
    check_scales(rewriter)
    while any(
        [
            share_quantizes(rewriter),
            fold_constants(rewriter),
            cancel_pairs(rewriter),
            sink_dequantizes(rewriter),
            hoist_quantizes(rewriter),
        ]
    ):
        pass


def check_scales(rewriter: Rewriter) -> None:
    """Refuse constant scales that are not positive and finite.

    Raises:
        RecipeError: naming the node.
    """
    for node in rewriter.nodes(QUANTIZE, DEQUANTIZE):
        scale = rewriter.value(argument(node, 1))
        if scale is not None and not bool(((scale > 0) & torch.isfinite(scale)).all()):
            raise RecipeError(f"{node.name}: a scale must be positive and finite, got {scale.min()}; calibrate again")


def fold_constants(rewriter: Rewriter) -> bool:
    """Codes of constants are made now and stored: Q of a weight, and a rearranged or cut constant of codes."""
    changed = False
    for node in rewriter.nodes(QUANTIZE, *REARRANGING, *CUTTING):
        is_codes = val_of(node).dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        value = rewriter.value(node) if is_codes else None
        if value is None:
            continue
        rewriter.report.moved.append(f"{node.name}: made now, stored as FP8")
        rewriter.replace(node, rewriter.add_constant(value.contiguous(), node))
        changed = True
    return changed | _fold_dynamic(rewriter)


def _fold_dynamic(rewriter: Rewriter) -> bool:
    """A weight through quantize_dynamic has the same codes and scale every time: both are made now."""
    changed = False
    for node in rewriter.nodes(QUANTIZE_DYNAMIC):
        source, *how = arguments(node)
        value = rewriter.value(source)
        if value is None:
            continue
        made = QUANTIZE_DYNAMIC(value, *how)  # codes and scale
        rewriter.report.moved.append(f"{node.name}: made now, stored as FP8 with its scale")
        for item in list(node.users):  # each takes one of the two
            rewriter.replace(item, rewriter.add_constant(made[argument(item, 1)], item))
        changed = True
    return changed


def share_quantizes(rewriter: Rewriter) -> bool:
    """Of several equal Qs of one tensor (q, k and v read the same norm) the first serves all."""
    changed, kept = False, list[Quantize]()
    for q in rewriter.quantizes():
        twin = next((other for other in kept if are_equal(rewriter, q, other)), None)
        if twin is None:
            kept.append(q)
            continue
        rewriter.report.moved.append(f"{q.node.name}: shared with {twin.node.name}")
        rewriter.replace(q.node, twin.node)
        changed = True
        for index in (0, 1) if q.is_dynamic else ():
            items = [user for user in twin.node.users if user.target is operator.getitem and user.args[1] == index]
            items.sort(key=list(rewriter.graph.nodes).index)
            for item in items[1:]:
                rewriter.replace(item, items[0])
    return changed


def are_equal(rewriter: Rewriter, a: Quantize, b: Quantize) -> bool:
    """Whether two Qs make the same codes."""
    if (a.source, a.kind, a.dtype, a.is_dynamic) != (b.source, b.kind, b.dtype, b.is_dynamic):
        return False
    if a.is_dynamic or same_scale(a.scale, b.scale):
        return True
    scale = argument(a.node, 1)
    return a.scale is None and scale is argument(b.node, 1) and not rewriter.may_change(scale)


def cancel_pairs(rewriter: Rewriter) -> bool:
    """DQ then Q with the same scale gives the codes that went in (but for NaN's sign): drop both."""
    changed = False
    for q in rewriter.quantizes():
        dq = rewriter.dequantize(q.source)
        if dq is None or q.is_dynamic or not cancels(q, dq):
            continue
        rewriter.report.moved.append(f"{dq.node.name}, {q.node.name}: cancelled")
        rewriter.replace(q.node, dq.codes)
        changed = True
    return changed


def cancels(q: Quantize, dq: Dequantize) -> bool:
    """Whether encoding what was decoded gives the same codes.

    fp16 could overflow between the two; a scale beyond 2**100 either way could leave fp32. E5M2 has infinities, which a
    Q makes finite: its codes must come from a Q.
    """
    if q.dtype == torch.float8_e5m2 and not is_call(source_of(dq.codes), QUANTIZE):
        return False
    if q.kind != dq.kind or q.dtype != val_of(dq.codes).dtype or not same_scale(q.scale, dq.scale):
        return False
    assert q.scale is not None, "equal scales are known"
    is_safe = bool(((q.scale < _SCALE_LIMIT) & (q.scale > 1 / _SCALE_LIMIT)).all())
    return is_safe and dq.out_dtype != torch.float16


def sink_dequantizes(rewriter: Rewriter) -> bool:
    """rearrange(DQ(codes)) -> DQ(rearrange(codes)), for one scale a tensor; so a DQ meets its GEMM."""
    changed = False
    for node in rewriter.nodes(*REARRANGING, *CUTTING, *SPLITTING):
        dq = rewriter.dequantize(argument(node, 0))
        if dq is None or dq.kind != "per_tensor" or rewriter.may_change(dq.scale_node):
            continue
        if dq.node in rewriter.overwritten:
            continue
        moved = rewriter.call_like(node, dq.codes)
        if node.target in SPLITTING:
            for item in list(node.users):
                _decode_instead(rewriter, item, rewriter.call_like(item, moved), dq)
            rewriter.erase(node)
        else:
            _decode_instead(rewriter, node, moved, dq)
        rewriter.report.moved.append(f"{dq.node.name}: moved below {node.name}")
        rewriter.erase(dq.node)
        changed = True
    return changed


def _decode_instead(rewriter: Rewriter, old: Node, codes: Node, dq: Dequantize) -> None:
    args = (codes, dq.scale_node, dq.kind, dq.out_dtype)
    rewriter.replace(old, rewriter.call(old, DEQUANTIZE, args, val_of(old)))


def hoist_quantizes(rewriter: Rewriter) -> bool:
    """Q(rearrange(x)) -> rearrange(Q(x)), for one scale a tensor; so a Q meets what makes its values."""
    changed = False
    for q in rewriter.quantizes():
        is_gone = q.node not in q.source.users  # replaced in an earlier turn of this loop
        if is_gone or not q.is_per_tensor or not can_absorb(source_of(q.source)) or q.source in rewriter.overwritten:
            continue  # a Q that will run alone reads what it is given: above, it might read a strided tensor
        if is_call(q.source, *REARRANGING):
            changed |= _hoist_over(rewriter, q, [q.source], REARRANGING)
        elif is_call(q.source, *CUTTING):  # every reader of the whole: else more would be quantized than is used
            readers = sorted(argument(q.source, 0).users, key=list(rewriter.graph.nodes).index)
            changed |= _hoist_over(rewriter, q, readers, CUTTING)
        elif _is_split_item(q.source):
            changed |= _hoist_over_split(rewriter, q)
    return changed


def source_of(node: Node) -> Node:
    """What makes the values that a node only rearranges or cuts."""
    while is_call(node, *REARRANGING, *CUTTING) or _is_split_item(node):
        node = argument(node, 0).args[0] if _is_split_item(node) else argument(node, 0)
    return node


def can_absorb(node: Node) -> bool:
    """Whether a Q may vanish in the op that makes its input."""
    return is_call(node, *NORMS, aten.gelu.default, DEQUANTIZE) or silu_of(node) is not None


def silu_of(node: Node) -> Node | None:
    """The silu that one product alone reads: SwiGLU's."""
    if not is_call(node, aten.mul.Tensor):
        return None
    found = [part for part in arguments(node)[:2] if is_call(part, aten.silu.default) and len(part.users) == 1]
    return found[0] if found else None


def _is_split_item(node: Node) -> bool:
    return is_call(node, operator.getitem) and is_call(argument(node, 0), *SPLITTING)


def _hoist_over(rewriter: Rewriter, q: Quantize, nodes: list[Node], kinds: tuple[Any, ...]) -> bool:
    if not all(is_call(node, *kinds) and _only_quantized_like(rewriter, node, q) for node in nodes):
        return False
    above = _quantize_above(rewriter, q, nodes[0], argument(nodes[0], 0))
    for node in nodes:
        rewriter.replace(next(iter(node.users)), rewriter.call_like(node, above))
    rewriter.report.moved.append(f"{q.node.name}: moved above {', '.join(node.name for node in nodes)}")
    return True


def _hoist_over_split(rewriter: Rewriter, q: Quantize) -> bool:
    split = argument(q.source, 0)
    assert isinstance(split, Node), "an item is of a node"
    items = list(split.users)
    if not all(_only_quantized_like(rewriter, item, q) for item in items) or len(argument(split, 0).users) > 1:
        return False
    above = _quantize_above(rewriter, q, split, argument(split, 0))
    moved = rewriter.call_like(split, above)
    for item in items:
        rewriter.replace(next(iter(item.users)), rewriter.call_like(item, moved))
    rewriter.report.moved.append(f"{q.node.name}: moved above {split.name}")
    return True


def _only_quantized_like(rewriter: Rewriter, node: Node, q: Quantize) -> bool:
    """Whether a node's one reader is a Q with q's scale."""
    readers = list(node.users)
    if len(readers) != 1 or not is_call(readers[0], QUANTIZE):
        return False
    other = rewriter.quantize(readers[0])
    return other.is_per_tensor and other.dtype == q.dtype and same_scale(other.scale, q.scale)


def _quantize_above(rewriter: Rewriter, q: Quantize, node: Node, source: Any) -> Node:
    """The same Q of what `node` rearranges, in front of it; its scale as a constant that stands before."""
    assert q.scale is not None, "one known scale"
    scale = rewriter.add_constant(q.scale, node)
    return rewriter.call(node, QUANTIZE, (source, scale, q.kind, q.dtype), val_of(source).to(q.dtype))


def why_not_hoisted(rewriter: Rewriter, q: Quantize) -> tuple[str, str] | None:
    """(reason, remedy) for a Q that an op which only rearranges keeps from a producer; None for any other."""
    node = q.source
    cut = _is_split_item(node)
    if source_of(node) is node or not can_absorb(source_of(node)):
        return None
    what = describe(argument(node, 0) if cut else node)
    if not q.is_per_tensor:
        kind = "computed scale" if q.kind == "per_tensor" else f"{q.kind} scale"
        return f"a {kind} does not pass through {what}", f"quantize before {what}, or with one constant scale"
    return (
        f"{what} is also read in high precision, or with another scale",
        f"let every reader of {what} take the same Q",
    )
