"""One spelling for what graphs write in several: no-ops dropped, views as reshapes, norms and activations named."""

import math
from typing import Any

import torch
from torch.fx import Node

from octavo.qdq.graph import DEQUANTIZE, QUANTIZE, Rewriter, argument, arguments, aten, is_call, val_of
from octavo.qdq.patterns import CASTS, Either, Num, Op, Var, add, div, match, mul, power

_COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.detach_.default,
           aten.lift_fresh_copy.default)  # fmt: skip
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_CHECKS = (aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default)
_MEAN = (aten.mean.dim,)


def normalize_spelling(rewriter: Rewriter, *, accept_decomposed: bool = False) -> None:
    """Run every step below over the graph.

    Args:
        accept_decomposed: take quantized_decomposed.quantize_per_tensor, which rounds to whole numbers first, as Q.
    """
    drop_no_ops(rewriter)
    views_to_reshapes(rewriter)
    adopt_decomposed_pairs(rewriter, accept_decomposed)
    name_linears(rewriter)
    name_layer_norms(rewriter)
    name_rms_norms(rewriter)
    name_silu(rewriter)
    name_gelu(rewriter)
    rewriter.graph.eliminate_dead_code()


def drop_no_ops(rewriter: Rewriter) -> None:
    """Drop idle dropout, checks, casts to the same dtype, and copies (where nothing is written in place)."""
    is_functional = not rewriter.written
    for node in rewriter.nodes():
        if node.target in _CHECKS:
            rewriter.graph.erase_node(node)
            continue
        is_copy = node.target in _COPIES and is_functional
        is_dropout = is_call(node, aten.dropout.default) and (node.args[1] == 0 or not argument(node, 2))
        is_cast = node.target in CASTS and _is_same_dtype(node)
        if is_copy or is_dropout or is_cast:
            rewriter.replace(node, argument(node, 0))


def views_to_reshapes(rewriter: Rewriter) -> None:
    """A view of what a rewrite makes may have other strides than the author's: reshape copies where it must."""
    for node in rewriter.nodes(*_VIEWS):
        node.target = aten.reshape.default


def adopt_decomposed_pairs(rewriter: Rewriter, accept_quantize: bool) -> None:
    """quantized_decomposed's pairs of torch, in FP8, as octavo's; see normalize_spelling."""
    if not hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor"):
        return
    pair = torch.ops.quantized_decomposed
    for node in rewriter.nodes(pair.quantize_per_tensor.default, pair.dequantize_per_tensor.default):
        is_quantize = node.target is pair.quantize_per_tensor.default
        source, scale, zero_point, _low, _high, dtype = arguments(node)
        is_fp8 = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        if not is_fp8 or zero_point != 0 or (is_quantize and not accept_quantize):
            continue
        constant = rewriter.add_constant(torch.tensor(scale, dtype=torch.float32, device=val_of(node).device), node)
        last = dtype if is_quantize else val_of(node).dtype
        args = (source, constant, "per_tensor", last)
        new = rewriter.call(node, QUANTIZE if is_quantize else DEQUANTIZE, args, val_of(node))
        rewriter.report.moved.append(f"{node.name}: quantized_decomposed's pair is taken as octavo's")
        rewriter.replace(node, new)


def name_linears(rewriter: Rewriter) -> None:
    """A product of a tensor as a matrix, shaped back after it, as a product of the tensor: undoes export's core ops."""
    for node in rewriter.nodes(aten.mm.default, aten.addmm.default):
        is_addmm = is_call(node, aten.addmm.default)
        if is_addmm and any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            continue
        matrix, weight = arguments(node)[1:3] if is_addmm else arguments(node)[:2]
        if not is_call(matrix, aten.reshape.default):
            continue
        x, readers = argument(matrix, 0), list(node.users)
        shape = (*val_of(x).shape[:-1], val_of(weight).shape[-1])
        is_flattened = val_of(x).shape[-1] == val_of(matrix).shape[-1]
        if not is_flattened or any(not is_call(r, aten.reshape.default) or val_of(r).shape != shape for r in readers):
            continue
        for reader in readers:
            product = rewriter.call(reader, aten.matmul.default, (x, weight), val_of(reader))
            if is_addmm:
                product = rewriter.call(reader, aten.add.Tensor, (product, argument(node, 0)), val_of(reader))
            rewriter.replace(reader, product)


def name_layer_norms(rewriter: Rewriter) -> None:
    """native_layer_norm, of which only the output is read, as layer_norm."""
    for node in rewriter.nodes(aten.native_layer_norm.default):
        items = list(node.users)
        if len(items) == 1 and items[0].args[1] == 0:
            new = rewriter.call(items[0], aten.layer_norm.default, tuple(arguments(node)), val_of(items[0]))
            rewriter.replace(items[0], new)


def name_rms_norms(rewriter: Rewriter) -> None:
    """weight * (x / sqrt(mean(x**2) + eps)), however it is written, as rms_norm: rounded once, at its end."""
    x, eps = Var("x"), Num(name="eps")
    mean = Op(_MEAN, (power(x, 2),))
    spread = add(mean, eps)
    root = Op((aten.sqrt.default,), (spread,))
    inverses = (
        Op((aten.rsqrt.default,), (spread,)),
        Op((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor), (spread, Num(-0.5))),
        Op((aten.reciprocal.default,), (root,)),
        mul(Op((aten.reciprocal.default,), (root,)), Num(1.0)),
        div(Num(1.0), root),
    )
    normed = Either((mul(x, Either(inverses)), div(x, root)))
    for node in rewriter.nodes(aten.mul.Tensor):
        found = match(rewriter, mul(Var("weight"), normed), node)
        if found is None or not _is_last_mean(rewriter, node, found):
            continue
        source, weight = found["x"], found["weight"]
        width = val_of(source).shape[-1]
        if rewriter.value(weight) is None or tuple(val_of(weight).shape) != (width,):
            continue
        args = (source, [width], weight, found["eps"])
        if val_of(source).dtype == val_of(node).dtype:
            _rename(rewriter, node, aten.rms_norm.default, args)


def name_silu(rewriter: Rewriter) -> None:
    """x * sigmoid(x) as silu."""
    x = Var("x")
    for node in rewriter.nodes(aten.mul.Tensor):
        found = match(rewriter, mul(x, Op((aten.sigmoid.default,), (x,))), node)
        if found is not None and val_of(found["x"]).dtype == val_of(node).dtype:
            _rename(rewriter, node, aten.silu.default, (found["x"],))


def name_gelu(rewriter: Rewriter) -> None:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3))), in the usual orders of its factors, as tanh gelu."""
    x = Var("x")
    cubic = Either((add(x, mul(power(x, 3), Num(0.044715))),
                  mul(x, add(mul(power(x, 2), Num(0.044715)), Num(1.0)))))  # fmt: skip
    bracket = add(Op((aten.tanh.default,), (mul(cubic, Num(math.sqrt(2 / math.pi))),)), Num(1.0))
    gelu = Either((mul(mul(x, Num(0.5)), bracket), mul(mul(x, bracket), Num(0.5)), mul(x, mul(bracket, Num(0.5)))))
    for node in rewriter.nodes(aten.mul.Tensor, aten.mul.Scalar):
        found = match(rewriter, gelu, node)
        if found is None or val_of(found["x"]).dtype != val_of(node).dtype:
            continue
        new = rewriter.call(node, aten.gelu.default, (found["x"],), val_of(node))
        new.kwargs = {"approximate": "tanh"}
        rewriter.report.moved.append(f"{node.name}: spelled-out GeLU named")
        rewriter.replace(node, new)


def _rename(rewriter: Rewriter, node: Node, target: Any, args: tuple[Any, ...]) -> None:
    new = rewriter.call(node, target, args, val_of(node))
    rewriter.report.moved.append(f"{node.name}: spelled-out {str(target).split('.')[1]} named")
    rewriter.replace(node, new)


def _is_same_dtype(node: Node) -> bool:
    source = argument(node, 0)
    dtype = argument(node, 1, "dtype")
    return isinstance(source, Node) and dtype == val_of(source).dtype and val_of(node).device == val_of(source).device


def _is_last_mean(rewriter: Rewriter, node: Node, found: dict[str, Any]) -> bool:
    """Whether the mean below a matched norm runs over the last dim and keeps it."""
    means: list[Node] = []
    pending = [node]
    while pending:
        current = pending.pop()
        if is_call(current, *_MEAN):
            means.append(current)
        elif current is not found["x"]:
            pending += [source for source in current.all_input_nodes if source is not found["weight"]]
    rank = val_of(found["x"]).dim()
    return all(
        [dim % rank for dim in argument(mean, 1, "dim")] == [rank - 1] and argument(mean, 2, "keepdim", False)
        for mean in means
    )
