"""How each op of an exported graph is written in ONNX: the subset that Llama's and GPT-J's blocks are written in."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from octavo.errors import ConfigError
from octavo.numerics.scaling import Scaling
from octavo.qdq.graph import DEQUANTIZE, QUANTIZE, argument, arguments, aten, val_of
from octavo.qdq.moves import RESHAPES, SPLITTING, TRANSPOSES
from octavo.qdq.onnx.tensors import onnx_dtype

if TYPE_CHECKING:
    from octavo.qdq.onnx.writing import GraphWriter

Writer = Callable[["GraphWriter", Node], object]


def _read(writer: "GraphWriter", operand: Any, dtype: torch.dtype) -> str:
    """A tensor or number as an operand of a dtype: ONNX promotes nothing by itself."""
    if not isinstance(operand, Node):
        return writer.constant(torch.tensor(operand, dtype=dtype))
    name = writer.name(operand)
    return name if val_of(operand).dtype == dtype else writer.emit("Cast", [name], "cast", to=onnx_dtype(dtype))


def _same_dtype(op_type: str, **attributes: object) -> Writer:
    """An op whose operands and result have one dtype."""

    def write(writer: "GraphWriter", node: Node) -> None:
        if node.kwargs.get("alpha", 1) != 1:
            raise ConfigError(f"{node.name}: {op_type} with alpha has no ONNX form; write the product")
        dtype = val_of(node).dtype
        operands = [_read(writer, operand, dtype) for operand in arguments(node)]
        writer.emit(op_type, operands, node, **attributes)

    return write


def _shaped(op_type: str) -> Writer:
    """An op that gives its first operand the node's shape."""
    return lambda writer, node: writer.emit(
        op_type, [writer.name(argument(node, 0)), writer.ints(list(val_of(node).shape))], node
    )


def _silu(writer: "GraphWriter", node: Node) -> None:
    x = writer.name(argument(node, 0))
    writer.emit("Mul", [x, writer.emit("Sigmoid", [x], "sigmoid")], node)


def _rsqrt(writer: "GraphWriter", node: Node) -> None:
    root = writer.emit("Sqrt", [writer.name(argument(node, 0))], "sqrt")
    writer.emit("Reciprocal", [root], node)


def _mean(writer: "GraphWriter", node: Node) -> None:
    x = _read(writer, argument(node, 0), val_of(node).dtype)
    axes = writer.ints(list(argument(node, 1)))
    writer.emit("ReduceMean", [x, axes], node, keepdims=int(argument(node, 2, "keepdim", False)))


def _rms_norm(writer: "GraphWriter", node: Node) -> None:
    x, shape, weight = argument(node, 0), argument(node, 1), argument(node, 2, "weight")
    eps = argument(node, 3, "eps")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    operands = [writer.name(x), _affine(writer, node, weight, 1.0)]
    writer.emit("RMSNormalization", operands, node, axis=-len(shape), epsilon=float(eps))


def _layer_norm(writer: "GraphWriter", node: Node) -> None:
    x, shape = argument(node, 0), argument(node, 1)
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    operands = [writer.name(x), _affine(writer, node, weight, 1.0)]
    operands += [] if bias is None else [_read(writer, bias, val_of(node).dtype)]
    writer.emit("LayerNormalization", operands, node, axis=-len(shape), epsilon=float(argument(node, 4, "eps", 1e-5)))


def _affine(writer: "GraphWriter", node: Node, weight: Any, fill: float) -> str:
    if weight is not None:
        return _read(writer, weight, val_of(node).dtype)
    return writer.constant(torch.full(tuple(argument(node, 1)), fill, dtype=val_of(node).dtype))


def _linear(writer: "GraphWriter", node: Node) -> None:
    weight = argument(node, 1)
    rank = val_of(weight).dim()
    flipped = writer.emit("Transpose", [writer.name(weight)], "weight", perm=list(range(rank))[::-1])
    bias = argument(node, 2, "bias")
    product = writer.emit("MatMul", [writer.name(argument(node, 0)), flipped], node if bias is None else "product")
    if bias is not None:
        writer.emit("Add", [product, writer.name(bias)], node)


def _addmm(writer: "GraphWriter", node: Node) -> None:
    bias, a, b = (writer.name(part) for part in arguments(node)[:3])
    scales = {name: float(node.kwargs.get(name, 1.0)) for name in ("alpha", "beta")}  # type: ignore[arg-type]
    writer.emit("Gemm", [a, b, bias], node, **scales)


def _repeat(writer: "GraphWriter", node: Node) -> None:
    """repeat_interleave: each element of a dim n times, one after the other."""
    x, repeats, dim = argument(node, 0), argument(node, 1), argument(node, 2, "dim")
    sizes = list(val_of(x).shape)
    if dim is None:
        sizes, dim = [val_of(x).numel()], 0
    dim %= len(sizes)
    columns, grown = [*sizes[: dim + 1], 1, *sizes[dim + 1 :]], [*sizes[: dim + 1], repeats, *sizes[dim + 1 :]]
    column = writer.emit("Reshape", [writer.name(x), writer.ints(columns)], "column")
    repeated = writer.emit("Expand", [column, writer.ints(grown)], "repeated")
    writer.emit("Reshape", [repeated, writer.ints(list(val_of(node).shape))], node)


def _transpose(writer: "GraphWriter", node: Node) -> None:
    rank = val_of(node).dim()
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in argument(node, 1)]
    else:
        a, b = (
            (argument(node, 1) % rank, argument(node, 2) % rank) if node.target is aten.transpose.int else (0, rank - 1)
        )
        order[a], order[b] = order[b], order[a]
    writer.emit("Transpose", [writer.name(argument(node, 0))], node, perm=order)


def _slice(writer: "GraphWriter", node: Node) -> None:
    x, dim = argument(node, 0), argument(node, 1, "dim", 0)
    start, end = argument(node, 2, "start") or 0, argument(node, 3, "end")
    end = val_of(x).shape[dim] if end is None else end
    bounds = [writer.ints([number]) for number in (start, end, dim, argument(node, 4, "step", 1))]
    writer.emit("Slice", [writer.name(x), *bounds], node)


def _select(writer: "GraphWriter", node: Node) -> None:
    index = writer.constant(torch.tensor(argument(node, 2), dtype=torch.int64))
    writer.emit("Gather", [writer.name(argument(node, 0)), index], node, axis=argument(node, 1))


def _split(writer: "GraphWriter", node: Node) -> None:
    dim = argument(node, 2, "dim", 0)
    sizes = writer.ints([part.shape[dim] for part in node.meta["val"]])
    names = writer.emit_parts("Split", [writer.name(argument(node, 0)), sizes], node, len(node.meta["val"]), axis=dim)
    for item in node.users:
        writer.bind(item, names[argument(item, 1)])


def _concat(writer: "GraphWriter", node: Node) -> None:
    parts = [_read(writer, part, val_of(node).dtype) for part in argument(node, 0)]
    writer.emit("Concat", parts, node, axis=argument(node, 1, "dim", 0))


def _stack(writer: "GraphWriter", node: Node) -> None:
    dim = argument(node, 1, "dim", 0) % val_of(node).dim()
    parts = [writer.emit("Unsqueeze", [writer.name(part), writer.ints([dim])], "part") for part in argument(node, 0)]
    writer.emit("Concat", parts, node, axis=dim)


def _where(writer: "GraphWriter", node: Node) -> None:
    condition, *branches = arguments(node)
    operands = [_read(writer, branch, val_of(node).dtype) for branch in branches]
    writer.emit("Where", [writer.name(condition), *operands], node)


def _attention(writer: "GraphWriter", node: Node) -> None:
    q, k, v = arguments(node)[:3]
    mask, dropout = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    if dropout or val_of(q).dim() != 4:
        raise ConfigError(f"{node.name}: attention needs [batch, heads, tokens, head_dim] and no dropout for ONNX")
    operands = [writer.name(part) for part in (q, k, v)] + ([] if mask is None else [writer.name(mask)])
    scale = argument(node, 6, "scale")
    attributes = {} if scale is None else {"scale": float(scale)}
    is_causal = int(argument(node, 5, "is_causal", False))
    writer.emit("Attention", operands, node, is_causal=is_causal, **attributes)


def _quantize(writer: "GraphWriter", node: Node) -> None:
    x, scale, kind, dtype = arguments(node)
    scale_name, attributes = _scale(writer, node, x, scale, kind)
    zero = writer.constant(torch.zeros(_scale_shape(writer, scale, kind), dtype=torch.float32).to(dtype), "zero_point")
    writer.emit("QuantizeLinear", [writer.name(x), scale_name, zero], node, **attributes)


def _dequantize(writer: "GraphWriter", node: Node) -> None:
    codes, scale, kind, dtype = arguments(node)
    scale_name, attributes = _scale(writer, node, codes, scale, kind)
    operands = [writer.name(codes), scale_name]
    writer.emit("DequantizeLinear", operands, node, output_dtype=onnx_dtype(dtype), **attributes)


def _scale(writer: "GraphWriter", node: Node, x: Node, scale: Node, kind: str) -> tuple[str, dict[str, int]]:
    value = writer.rewriter.value(scale)
    if value is None:
        raise ConfigError(f"{node.name}: its scale is computed by the model; QuantizeLinear needs a constant here")
    if kind == "per_tensor":
        return writer.constant(value.reshape(()), "scale"), {}
    cols = val_of(x).shape[-1]
    if val_of(x).dim() == 2 and kind == "per_row":
        return writer.constant(value.reshape(-1), "scale"), {"axis": 0}
    if val_of(x).dim() == 2 and kind == "block_1x128" and cols % Scaling.of_kind(kind).block_size[1] == 0:
        return writer.constant(value, "scale"), {"axis": 1, "block_size": Scaling.of_kind(kind).block_size[1]}
    raise ConfigError(f"{node.name}: {kind} of {tuple(val_of(x).shape)} has no ONNX form; use per_tensor")


def _scale_shape(writer: "GraphWriter", scale: Node, kind: str) -> tuple[int, ...]:
    value = writer.rewriter.value(scale)
    assert value is not None, "checked before"
    return () if kind == "per_tensor" else (value.numel(),) if kind == "per_row" else tuple(value.shape)


WRITERS: dict[Any, Writer] = {
    aten.linear.default: _linear,
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), _same_dtype("MatMul")),
    aten.addmm.default: _addmm,
    **{getattr(aten, name).Tensor: _same_dtype(name.capitalize()) for name in ("add", "sub", "mul", "div")},
    aten.pow.Tensor_Scalar: _same_dtype("Pow"),
    **{
        getattr(aten, name).default: _same_dtype(name.capitalize())
        for name in ("neg", "sqrt", "reciprocal", "exp", "erf", "sigmoid", "tanh", "cos", "sin")
    },
    aten.square.default: lambda writer, node: writer.emit("Mul", [writer.name(argument(node, 0))] * 2, node),
    aten.rsqrt.default: _rsqrt,
    aten.silu.default: _silu,
    aten.gelu.default: lambda writer, node: writer.emit(
        "Gelu", [writer.name(argument(node, 0))], node, approximate=argument(node, 1, "approximate", "none")
    ),
    aten.softmax.int: lambda writer, node: writer.emit(
        "Softmax", [_read(writer, argument(node, 0), val_of(node).dtype)], node, axis=argument(node, 1)
    ),
    aten.mean.dim: _mean,
    aten.rms_norm.default: _rms_norm,
    aten.layer_norm.default: _layer_norm,
    **dict.fromkeys(RESHAPES, _shaped("Reshape")),
    aten.expand.default: _shaped("Expand"),
    aten.repeat_interleave.self_int: _repeat,
    **dict.fromkeys(TRANSPOSES, _transpose),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.embedding.default: lambda writer, node: writer.emit(
        "Gather", [writer.name(part) for part in arguments(node)[:2]], node, axis=0
    ),
    **dict.fromkeys(SPLITTING, _split),
    operator.getitem: lambda _writer, _node: None,  # bound where the split is written
    aten.cat.default: _concat,
    aten.stack.default: _stack,
    aten.to.dtype: lambda writer, node: writer.emit(
        "Cast", [writer.name(argument(node, 0))], node, to=onnx_dtype(val_of(node).dtype)
    ),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), _where),
    aten.scaled_dot_product_attention.default: _attention,
    QUANTIZE: _quantize,
    DEQUANTIZE: _dequantize,
}
