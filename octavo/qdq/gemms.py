"""Products of two dequantized operands become products of their codes; several of one input become one."""

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from octavo.numerics.scaling import GEMM_PAIRS, Scaling
from octavo.ops.gemm.scaled_mm import OUT_DTYPES
from octavo.qdq.fused import fp8_linear
from octavo.qdq.graph import Dequantize, Rewriter, argument, arguments, aten, describe, is_call, names, val_of
from octavo.qdq.operators import shaped
from octavo.qdq.report import FusedSite

PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A stored weight: codes [N, K], fp32 scale of its kind."""

    codes: torch.Tensor
    scale: torch.Tensor
    kind: str


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A product that can run on codes."""

    node: Node
    x: Dequantize
    weight: Weight
    bias: Node | None
    absorbed: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a product stays as it is, and what to change."""

    reason: str
    remedy: str


def fuse_gemms(rewriter: Rewriter, *, fast_accum: bool = False) -> None:
    """linear, matmul, mm and addmm of DQ(x) and DQ(w) as one fp8_linear; fast_accum: as in scaled_mm."""
    for node in rewriter.nodes(*PRODUCTS):
        found = match_gemm(rewriter, node)
        if isinstance(found, Gemm):
            _emit(rewriter, found, fast_accum)
    fold_bias_adds(rewriter)


def match_gemm(rewriter: Rewriter, node: Node) -> Gemm | Refusal:
    """A product read as a GEMM of codes, or why it is none."""
    if is_call(node, aten.linear.default):
        x_node, w_node, bias, is_transposed = argument(node, 0), argument(node, 1), argument(node, 2, "bias"), False
    elif is_call(node, aten.addmm.default):
        (bias, x_node, w_node), is_transposed = arguments(node)[:3], True
        if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            return Refusal("addmm scales its terms", "write alpha and beta as products")
    else:
        (x_node, w_node), bias, is_transposed = arguments(node)[:2], None, True
    x = rewriter.dequantize(x_node)
    if x is None:
        return Refusal(f"the first operand of {describe(node)} is not dequantized", "put a Q/DQ pair on it as well")
    if rewriter.may_change(x.scale_node):
        return Refusal("the graph writes to the scale of its first operand", "let the scale be constant, or a copy")
    weight = _read_weight(rewriter, w_node, is_transposed)
    if isinstance(weight, Refusal):
        return weight
    if (x.kind, weight.kind) not in GEMM_PAIRS:
        return Refusal(f"no GEMM takes {x.kind} x {weight.kind}", "use per_tensor or per_row, or 1x128 x 128x128")
    if val_of(node).dtype not in OUT_DTYPES:
        return Refusal(f"no GEMM writes {val_of(node).dtype}", "use bfloat16, float16 or float32")
    if val_of(x.codes).dim() == 0 or val_of(x.codes).shape[-1] != weight.codes.shape[1]:
        return Refusal("the operands are broadcast", "give both their full shape")
    if isinstance(bias, Node) and tuple(val_of(bias).shape) != (weight.codes.shape[0],):
        return Refusal(f"its bias is no vector of {weight.codes.shape[0]}", "add it after the product")
    absorbed = (node, x.node, w_node)
    return Gemm(node, x, weight, bias if isinstance(bias, Node) else None, absorbed)


def _read_weight(rewriter: Rewriter, node: Any, is_transposed: bool) -> Weight | Refusal:
    """The stored codes [N, K] behind a product's second operand ([K, N] where is_transposed)."""
    if is_transposed and _is_matrix_transpose(node):
        node, is_transposed = argument(node, 0), False
    dq = rewriter.dequantize(node)
    if dq is None:
        return Refusal("its second operand is not dequantized", "put a Q/DQ pair on it as well")
    codes = rewriter.value(dq.codes)
    if codes is None:
        return Refusal("a product of two activations has no FP8 op here", "leave this product in high precision")
    if codes.dim() != 2:
        return Refusal(f"its weight has {codes.dim()} dims", "use a matrix [N, K]")
    if dq.scale is None:
        return Refusal("its weight's scale is computed in the graph", "store the scale as a buffer")
    if not is_transposed:
        return Weight(codes.contiguous(), shaped(dq.scale, dq.kind), dq.kind)
    if dq.kind != "per_tensor":
        return Refusal(
            f"its weight's {dq.kind} scales run along the summed dim",
            "quantize the weight as [N, K] and transpose it after DQ",
        )
    stored = codes.view(torch.uint8).t().contiguous().view(codes.dtype)
    return Weight(stored, shaped(dq.scale, dq.kind), dq.kind)


def _is_matrix_transpose(node: Any) -> bool:
    if is_call(node, aten.t.default):
        return True
    if is_call(node, aten.transpose.int):
        return val_of(node).dim() == 2 and {dim % 2 for dim in arguments(node)[1:3]} == {0, 1}
    return is_call(node, aten.permute.default) and [dim % 2 for dim in argument(node, 1)] == [1, 0]


def _emit(rewriter: Rewriter, gemm: Gemm, fast_accum: bool) -> None:
    node, x, weight = gemm.node, gemm.x, gemm.weight
    if x.scale is not None:
        scale = rewriter.add_constant(shaped(x.scale, x.kind), node)
    elif x.kind == "per_tensor" and tuple(val_of(x.scale_node).shape) != (1, 1):
        scale_val = val_of(x.scale_node).reshape(1, 1)
        scale = rewriter.call(node, aten.reshape.default, (x.scale_node, [1, 1]), scale_val)
    else:
        scale = x.scale_node
    stored = [rewriter.add_constant(value, node) for value in (weight.codes, weight.scale)]
    args = (x.codes, scale, x.kind, *stored, weight.kind, gemm.bias, val_of(node).dtype, fast_accum)
    new = rewriter.call(node, fp8_linear, args, val_of(node))
    rewriter.report.fused.append(FusedSite(new.name, "scaled_mm", names(gemm.absorbed)))
    rewriter.replace(node, new)


def fold_bias_adds(rewriter: Rewriter) -> None:
    """fp8_linear(...) + a constant vector: into the product, rounded once."""
    for node in rewriter.nodes(aten.add.Tensor):
        left, right = arguments(node)[:2]
        product, bias = (left, right) if is_call(left, fp8_linear) else (right, left)
        if not is_call(product, fp8_linear) or len(product.users) > 1 or node.kwargs:
            continue
        value = rewriter.value(bias)
        out = val_of(product)
        if value is None or argument(product, 6) is not None:
            continue
        if (value.shape, value.dtype) != (out.shape[-1:], out.dtype):
            continue
        product.update_arg(6, rewriter.add_constant(value, product))
        rewriter.report.moved.append(f"{node.name}: into {product.name} as its bias")
        rewriter.replace(node, product)


def merge_siblings(rewriter: Rewriter, nodes: list[Node]) -> Node | None:
    """One product in place of several of the same codes; returns the split of its result, None where they differ."""
    order = {node: index for index, node in enumerate(rewriter.graph.nodes)}
    first = min(nodes, key=order.__getitem__)  # what the others read beside constants is what it reads
    if len(nodes) < 2 or any(not are_siblings(rewriter, first, node) for node in nodes):
        return None
    weights = [weight_of(rewriter, node) for node in nodes]
    joined = join_weights(weights)
    biases = [argument(node, 6) for node in nodes]
    if joined is None or any(bias is not None and rewriter.value(bias) is None for bias in biases):
        return None
    stored = [rewriter.add_constant(value, first) for value in (joined.codes, joined.scale)]
    bias = join_biases(rewriter, nodes)
    bias_node = None if bias is None else rewriter.add_constant(bias, first)
    args = (*arguments(first)[:3], *stored, joined.kind, bias_node, *arguments(first)[7:])
    widths = [weight.codes.shape[0] for weight in weights]
    val = val_of(first).new_empty((*val_of(first).shape[:-1], sum(widths)))
    whole = rewriter.call(first, fp8_linear, args, val)
    parts = val.split(widths, -1)
    split = rewriter.call(first, aten.split_with_sizes.default, (whole, widths, -1), parts)
    items = [rewriter.item(first, split, index, part) for index, part in enumerate(parts)]
    for node, item in zip(nodes, items, strict=True):
        rewriter.replace(node, item)
    _merge_sites(rewriter, nodes, whole)
    return split


def weight_of(rewriter: Rewriter, product: Node) -> Weight:
    """The stored weight of an fp8_linear."""
    codes, scale = rewriter.value(argument(product, 3)), rewriter.value(argument(product, 4))
    assert codes is not None and scale is not None, "a fused product's weight is constant"
    return Weight(codes, scale, argument(product, 5))


def are_siblings(rewriter: Rewriter, a: Node, b: Node) -> bool:
    """Whether two products read the same codes under the same scale and write the same dtype."""
    same_input = is_call(b, fp8_linear) and argument(a, 0) is argument(b, 0) and a.args[2] == argument(b, 2)
    if not same_input or argument(a, 7) != argument(b, 7):
        return False
    left, right = rewriter.value(argument(a, 1)), rewriter.value(argument(b, 1))
    return argument(a, 1) is argument(b, 1) or (left is not None and right is not None and torch.equal(left, right))


def join_weights(weights: list[Weight]) -> Weight | None:
    """Weights stacked along N, every row with the scale that it had; None where blocks would straddle two of them."""
    kinds = {weight.kind for weight in weights}
    codes = torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(weights[0].codes.dtype)
    if len({weight.codes.dtype for weight in weights}) > 1:
        return None
    if kinds == {"per_tensor"} and all(torch.equal(weight.scale, weights[0].scale) for weight in weights):
        return Weight(codes, weights[0].scale, "per_tensor")
    if kinds <= {"per_tensor", "per_row"}:
        scales = [weight.scale.expand(weight.codes.shape[0], 1) for weight in weights]
        return Weight(codes, torch.cat(scales).contiguous(), "per_row")
    block_rows = Scaling.of_kind(weights[0].kind).block_size[0]
    if len(kinds) > 1 or any(weight.codes.shape[0] % block_rows for weight in weights[:-1]):
        return None
    return Weight(codes, torch.cat([weight.scale for weight in weights]), weights[0].kind)


def join_biases(rewriter: Rewriter, nodes: list[Node]) -> torch.Tensor | None:
    """The products' constant biases, stacked, with zeros for those that have none; None where none has."""
    values = [rewriter.value(argument(node, 6)) for node in nodes]
    known = [value for value in values if value is not None]
    if not known:
        return None
    widths = [val_of(node).shape[-1] for node in nodes]
    pairs = zip(values, widths, strict=True)
    return torch.cat([known[0].new_zeros(width) if value is None else value for value, width in pairs])


def _merge_sites(rewriter: Rewriter, nodes: list[Node], whole: Node) -> None:
    merged = {node.name for node in nodes}
    sites = [site for site in rewriter.report.fused if site.name in merged]
    absorbed = tuple(name for site in sites for name in site.absorbed)
    rewriter.report.fused = [site for site in rewriter.report.fused if site.name not in merged]
    rewriter.report.fused.append(FusedSite(whole.name, "scaled_mm", absorbed))
