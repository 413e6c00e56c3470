"""A Q after a norm or an activation joins it: the values that it would have read never exist in high precision."""

from typing import Any

import torch
from torch.fx import Node

from octavo.numerics.scaling import reciprocal
from octavo.qdq.fused import activation_to_fp8, fp8_linear, norm_to_fp8, to_fp8
from octavo.qdq.gemms import Refusal, merge_siblings
from octavo.qdq.graph import Quantize, Rewriter, argument, arguments, aten, describe, is_call, names, val_of
from octavo.qdq.moves import NORMS, SPLITTING, silu_of, source_of, why_not_hoisted
from octavo.qdq.report import FusedSite, LeftOver

_NORM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_producers(rewriter: Rewriter) -> None:
    """Every Q joins its producer, or runs as one quantizing kernel and is listed with the reason."""
    for q in rewriter.quantizes():
        refusal = fuse_quantize(rewriter, q)
        if refusal is not None:
            _run_alone(rewriter, q, refusal)


def fuse_quantize(rewriter: Rewriter, q: Quantize) -> Refusal | None:
    """Join one Q with what makes its input; why not, else."""
    source = q.source
    if not q.is_dynamic and not q.is_per_tensor:
        why = "its scale is computed in the graph" if q.scale is None else f"a known {q.kind} scale has no fused op"
        return Refusal(why, "use one constant scale, or quantize_dynamic")
    why_below = why_not_hoisted(rewriter, q)
    if why_below is not None:
        return Refusal(*why_below)
    if is_call(source, *NORMS):
        return fuse_norm(rewriter, q)
    if is_call(source, aten.gelu.default):
        return fuse_gelu(rewriter, q)
    if silu_of(source) is not None:
        return fuse_swiglu(rewriter, q)
    return Refusal(f"{describe(source_of(source))} writes no FP8", "nothing: one kernel quantizes it")


def fuse_norm(rewriter: Rewriter, q: Quantize) -> Refusal | None:
    """Q(norm(x)), and the residual add before it, as norm_quantize."""
    norm = q.source
    kind = "rms_norm" if is_call(norm, aten.rms_norm.default) else "layer_norm"
    x = argument(norm, 0)
    weight, bias = argument(norm, 2, "weight"), argument(norm, 3, "bias") if kind == "layer_norm" else None
    eps = argument(norm, 3 if kind == "rms_norm" else 4, "eps")
    refusal = _check_norm(norm, x)
    if refusal is not None:
        return refusal
    is_constant = all(part is None or rewriter.value(part) is not None for part in (weight, bias))
    # a computed weight may not be there yet where the sum is made, and the sum may not be what the norm reads
    first = residual_add(x) if is_constant and x not in rewriter.overwritten else None
    # rms_norm's own default is that of the type in which it computes
    eps = (torch.finfo(torch.float32).eps if kind == "rms_norm" else 1e-5) if eps is None else float(eps)
    before = norm if first is None else first
    operands = (x, None) if first is None else (argument(first, 0), argument(first, 1))
    absorbed = (norm, q.node) if first is None else (first, norm, q.node)
    if weight is None:
        device = val_of(x).device
        weight = rewriter.add_constant(torch.ones(val_of(norm).shape[-1], device=device), before)
    weight, bias = (_bring_before(rewriter, part, before) for part in (weight, bias))
    args = (*operands, weight, bias, eps, kind, _known(rewriter, q, before), q.kind, q.dtype)
    new = rewriter.call(before, norm_to_fp8, args, None)
    if first is not None:
        summed = rewriter.item(before, new, 2, val_of(first))
        first.replace_all_uses_with(summed)
    _replace_codes(rewriter, q, new, before)
    op = "norm_quantize" if first is None else "residual + norm_quantize"
    rewriter.report.fused.append(FusedSite(new.name, op, names(absorbed)))
    rewriter.graph.eliminate_dead_code()
    return None


def _check_norm(norm: Node, x: Any) -> Refusal | None:
    if len(norm.users) > 1:
        return _read_elsewhere(norm)
    if len(argument(norm, 1)) != 1:
        return Refusal("its norm runs over several dims", "flatten them before the norm")
    if val_of(norm).dtype != val_of(x).dtype or val_of(x).dtype not in _NORM_DTYPES:
        return Refusal("its norm changes the dtype", "give x, weight and output one floating-point dtype")
    return None


def residual_add(x: Any) -> Node | None:
    """The add of two equally shaped and typed tensors that a norm reads, where it can be done in the norm's pass."""
    if not is_call(x, aten.add.Tensor) or x.kwargs or not all(isinstance(part, Node) for part in arguments(x)[:2]):
        return None
    left, right = (val_of(part) for part in arguments(x)[:2])
    same = left.shape == right.shape and left.dtype == right.dtype == val_of(x).dtype
    return x if same else None


def fuse_gelu(rewriter: Rewriter, q: Quantize) -> Refusal | None:
    """Q(gelu(h)), and a bias added before it, as activation_quantize."""
    gelu = q.source
    if argument(gelu, 1, "approximate", "none") != "tanh":
        return Refusal("octavo's GeLU is the tanh form, this one is erf's", "use gelu(approximate='tanh')")
    if len(gelu.users) > 1:
        return _read_elsewhere(gelu)
    hidden, bias, absorbed = argument(gelu, 0), None, [gelu, q.node]
    assert isinstance(hidden, Node), "gelu reads a node"
    if is_call(hidden, aten.add.Tensor) and len(hidden.users) == 1 and not hidden.kwargs:
        left, right = arguments(hidden)[:2]
        orders = [(x, y) for x, y in ((left, right), (right, left)) if _is_bias_add(rewriter, x, y, hidden)]
        if orders:
            absorbed.insert(0, hidden)
            hidden, bias = orders[0]
    args = (hidden, bias, "gelu", _known(rewriter, q, gelu), q.kind, q.dtype)
    new = rewriter.call(gelu, activation_to_fp8, args, None)
    _replace_codes(rewriter, q, new, gelu)
    rewriter.report.fused.append(FusedSite(new.name, "gelu activation_quantize", names(absorbed)))
    return None


def fuse_swiglu(rewriter: Rewriter, q: Quantize) -> Refusal | None:
    """Q(silu(gate) * up) as activation_quantize of gate and up in one tensor: halves of a split, or products merged."""
    product = q.source
    if len(product.users) > 1:
        return _read_elsewhere(product)
    silu = silu_of(product)
    assert silu is not None, "the caller looked"
    up = argument(product, 1) if argument(product, 0) is silu else argument(product, 0)
    absorbed = (silu, product, q.node)
    joined = gate_and_up(rewriter, argument(silu, 0), up)
    if isinstance(joined, Refusal):
        return joined
    args = (joined, None, "swiglu", _known(rewriter, q, product), q.kind, q.dtype)
    new = rewriter.call(product, activation_to_fp8, args, None)
    _replace_codes(rewriter, q, new, product)
    rewriter.report.fused.append(FusedSite(new.name, "swiglu activation_quantize", names(absorbed)))
    return None


def gate_and_up(rewriter: Rewriter, gate: Any, up: Any) -> Node | Refusal:
    """One tensor [..., 2F] with the gate's half first."""
    if is_call(gate, fp8_linear) and is_call(up, fp8_linear) and gate is not up:
        if len(gate.users) > 1 or len(up.users) > 1:
            return Refusal("gate or up has another reader", "read them in SwiGLU alone")
        split = merge_siblings(rewriter, [gate, up])
        if split is not None:
            return argument(split, 0)
        return Refusal("gate and up cannot be one product", "let both read the same Q, with weights of one kind")
    halves = [_half_of(part) for part in (gate, up)]
    if halves[0] is not None and halves[1] is not None and halves[0][0] is halves[1][0]:
        if halves[0][0] in rewriter.overwritten:
            return Refusal("the graph writes to gate or up", "write to a copy")
        if (halves[0][1], halves[1][1]) == (0, 1):
            return halves[0][0]
        return Refusal("the up half stands before the gate's", "store the gate's rows first")
    return Refusal("gate and up are no two halves of one tensor", "make them by two linears of one Q, or by a split")


def _half_of(node: Any) -> tuple[Node, int] | None:
    """(tensor, 0 or 1) where a node is half of its last dim."""
    if is_call(node, aten.slice.Tensor):
        whole, dim, start, end = (*arguments(node)[:3], argument(node, 3, "end"))
        width = val_of(whole).shape[-1]
        last, half = dim % val_of(whole).dim() == val_of(whole).dim() - 1, val_of(node).shape[-1]
        if last and 2 * half == width and argument(node, 4, "step", 1) == 1 and start in (0, half) and end is not None:
            return whole, start // half
        return None
    if not isinstance(node, Node) or not (arguments(node) and is_call(argument(node, 0), *SPLITTING)):
        return None
    split: Any = argument(node, 0)
    whole, parts = argument(split, 0), split.meta["val"]
    dim = argument(split, 2, "dim", 0)
    is_even = len(parts) == 2 and parts[0].shape == parts[1].shape
    return (whole, argument(node, 1)) if is_even and dim % val_of(whole).dim() == val_of(whole).dim() - 1 else None


def _is_bias_add(rewriter: Rewriter, x: Any, bias: Any, hidden: Node) -> bool:
    """Whether hidden is x, of its own shape, and a constant vector."""
    value = rewriter.value(bias)
    is_vector = value is not None and value.shape == val_of(hidden).shape[-1:]
    is_whole = isinstance(x, Node) and val_of(x).shape == val_of(hidden).shape
    return is_vector and is_whole and x not in rewriter.overwritten


def _known(rewriter: Rewriter, q: Quantize, before: Node) -> Node | None:
    """The reciprocal of a known scale as a constant; None for a dynamic Q."""
    if q.is_dynamic:
        return None
    assert q.scale is not None, "the caller looked"
    return rewriter.add_constant(reciprocal(q.scale.float().reshape(1)), before)


def _bring_before(rewriter: Rewriter, node: Any, before: Node) -> Any:
    """A norm's weight where the fused op will read it: its value as a constant, else the node itself."""
    value = rewriter.value(node)
    return node if value is None else rewriter.add_constant(value, before)


def _replace_codes(rewriter: Rewriter, q: Quantize, new: Node, before: Node) -> None:
    """Readers of the Q read the fused op's codes, and its scale where that is dynamic."""
    if not q.is_dynamic:
        rewriter.replace(q.node, rewriter.item(before, new, 0, val_of(q.node)))
        return
    items = [rewriter.item(before, new, index, q.node.meta["val"][index]) for index in (0, 1)]
    for reader in list(q.node.users):
        rewriter.replace(reader, items[argument(reader, 1)])
    for item in items:
        rewriter.erase(item)


def _read_elsewhere(node: Node) -> Refusal:
    return Refusal(f"{describe(node)} is also read in high precision, or by another Q", "give every reader the same Q")


def _run_alone(rewriter: Rewriter, q: Quantize, refusal: Refusal) -> None:
    """One quantizing kernel in the Q's place, where octavo has one for its kind."""
    runs_as, name = "quantize", q.node.name
    if q.is_dynamic or q.is_per_tensor:
        args = (q.source, _known(rewriter, q, q.node), q.kind, q.dtype)
        new = rewriter.call(q.node, to_fp8, args, None)
        name = new.name
        _replace_codes(rewriter, q, new, q.node)
    else:
        runs_as = "qdq_quantize"
    rewriter.report.left_over.append(LeftOver(name, "Q", runs_as, refusal.reason, refusal.remedy))
