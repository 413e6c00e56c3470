"""What each ONNX operator means in torch: the subset that Llama's and GPT-J's blocks are written in."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError, DtypeError
from octavo.qdq.onnx.tensors import FP8_TYPES, to_torch, torch_dtype
from octavo.qdq.operators import dequantize, quantize

Value = torch.Tensor | np.ndarray | None
_FP8_NAMES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class OnnxNode:
    """An operator call: names of values, and attributes as Python values."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]

    @classmethod
    def read(cls, node: onnx.NodeProto) -> "OnnxNode":
        """From a file's."""
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        return cls(node.name or node.output[0], node.op_type, tuple(node.input), tuple(node.output), attributes)

    def get(self, name: str, default: Any) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def refuse(self, what: str, remedy: str) -> ConfigError:
        """An error that names this operator."""
        return ConfigError(f"{self.op_type} {self.name!r}: {what}; {remedy}")

    def ints(self, value: Value, what: str) -> list[int]:
        """A shape, axes or sizes, which must be known without running the model."""
        if not isinstance(value, np.ndarray):
            raise self.refuse(f"its {what} is computed by the model", "make it a constant")
        return [int(number) for number in value.reshape(-1)]


def _operand(value: Any, like: torch.Tensor) -> Any:
    """A known value beside a tensor as a tensor too: a number would lose its dtype and its dims."""
    return to_torch(value).to(like.device) if isinstance(value, np.ndarray) else value


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(_node: OnnxNode, *operands: Any) -> torch.Tensor:
        like = next(operand for operand in operands if isinstance(operand, torch.Tensor))
        return function(*(_operand(operand, like) for operand in operands))

    return run


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


def _reshape(node: OnnxNode, x: torch.Tensor, shape: Value) -> torch.Tensor:
    sizes = node.ints(shape, "shape")
    if not node.get("allowzero", 0):
        sizes = [x.shape[index] if size == 0 else size for index, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    shape = x.shape
    axis = node.get("axis", 1)
    return x.reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))


def _unsqueeze(node: OnnxNode, x: torch.Tensor, axes: Value) -> torch.Tensor:
    found = node.ints(axes, "axes")
    for axis in sorted(axis % (x.dim() + len(found)) for axis in found):
        x = x.unsqueeze(axis)
    return x


def _slice(node: OnnxNode, x: torch.Tensor, *bounds: Value) -> torch.Tensor:
    starts, ends, *rest = [None if b is None else node.ints(b, "bounds") for b in bounds]
    assert starts is not None and ends is not None, "Slice has both"
    axes = rest[0] if rest and rest[0] is not None else list(range(len(starts)))
    steps = rest[1] if len(rest) > 1 and rest[1] is not None else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise node.refuse(f"it steps by {step}", "flip by a Gather of constant indices")
        x = torch.ops.aten.slice.Tensor(x, axis, start, end, step)
    return x


def _split(node: OnnxNode, x: torch.Tensor, sizes: Value = None) -> tuple[torch.Tensor, ...]:
    axis = node.get("axis", 0)
    if sizes is not None:
        return x.split(node.ints(sizes, "sizes"), axis)
    return x.chunk(node.get("num_outputs", len(node.outputs)), axis)


def _concat(node: OnnxNode, *parts: Any) -> torch.Tensor:
    like = next(part for part in parts if isinstance(part, torch.Tensor))
    whole = [part if isinstance(part, torch.Tensor) else to_torch(part).to(like.device) for part in parts]
    return torch.cat(whole, node.get("axis", 0))


def _gather(node: OnnxNode, x: Any, indices: Any) -> torch.Tensor:
    axis = node.get("axis", 0)
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        return x.select(axis, int(indices))
    device = x.device if isinstance(x, torch.Tensor) else indices.device
    x, indices = (v if isinstance(v, torch.Tensor) else to_torch(v).to(device) for v in (x, indices))
    axis %= x.dim()
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    picked = x.index_select(axis, indices.reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _gemm(node: OnnxNode, a: torch.Tensor, b: torch.Tensor, c: Any = None) -> torch.Tensor:
    if node.get("transA", 0):
        a = a.t()
    out = F.linear(a, b) if node.get("transB", 0) else a @ b
    out = out * node.get("alpha", 1.0) if node.get("alpha", 1.0) != 1.0 else out
    if c is None:
        return out
    bias = _operand(c, a)
    return out + (bias * node.get("beta", 1.0) if node.get("beta", 1.0) != 1.0 else bias)


def _norm_width(node: OnnxNode, x: torch.Tensor) -> list[int]:
    if node.get("axis", -1) % x.dim() != x.dim() - 1:
        raise node.refuse("it runs over several dims", "flatten them before it")
    return [x.shape[-1]]


def _swish(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    if node.get("alpha", 1.0) != 1.0:
        raise node.refuse("its alpha is not 1", "write x * Sigmoid(alpha * x)")
    return F.silu(x)


def _attention(node: OnnxNode, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    mask = rest[0] if rest else None
    if any(part is not None for part in rest[1:]) or len(node.outputs) > 1 or node.get("softcap", 0.0):
        raise node.refuse("it has a past, several outputs or a softcap", "read whole sequences, without these")
    if q.dim() != 4:
        raise node.refuse("its operands are no [batch, heads, tokens, head_dim]", "reshape them before it")
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if mask is None else _operand(mask, q),
        is_causal=bool(node.get("is_causal", 0)),
        scale=node.attributes.get("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _quantize(node: OnnxNode, x: torch.Tensor, scale: Any, zero_point: Any = None) -> torch.Tensor:
    if not node.get("saturate", 1):
        raise node.refuse("it does not saturate", "set saturate=1")
    dtype = _fp8_dtype(node, zero_point)
    scale, kind, is_flipped = _scale_of(node, x, scale)
    x = x.t() if is_flipped else x
    codes = quantize(x, scale, kind=kind, dtype=dtype)
    return codes.t() if is_flipped else codes


def _dequantize(node: OnnxNode, codes: torch.Tensor, scale: Any, zero_point: Any = None) -> torch.Tensor:
    if codes.dtype not in _FP8_NAMES.values():
        raise DtypeError(f"DequantizeLinear {node.name!r}: its input is {codes.dtype}; only FP8 is read")
    _check_zero_point(node, zero_point)
    own = scale.dtype if isinstance(scale, torch.Tensor) else to_torch(scale).dtype
    code = node.get("output_dtype", 0)
    dtype = torch_dtype(code, f"DequantizeLinear {node.name!r}") if code else own
    scale, kind, is_flipped = _scale_of(node, codes, scale)
    out = dequantize(codes.t() if is_flipped else codes, scale, kind=kind, dtype=dtype)
    return out.t() if is_flipped else out


def _scale_of(node: OnnxNode, x: torch.Tensor, scale: Any) -> tuple[Any, str, bool]:
    """(scale as octavo.qdq takes it, its kind, whether x has to be transposed for it)."""
    if isinstance(scale, np.ndarray) and scale.size == 1:
        return float(scale.reshape(-1)[0]), "per_tensor", False
    scale = (to_torch(scale).to(x.device) if isinstance(scale, np.ndarray) else scale).float()
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    if scale.numel() == 1:
        return scale, "per_tensor", False
    if x.dim() == 2 and scale.dim() == 1 and not block:
        return scale.reshape(-1, 1), "per_row", axis % 2 == 1
    if x.dim() == 2 and block == 128 and scale.dim() == 2:
        is_flipped = axis % 2 == 0
        return scale.t() if is_flipped else scale, "block_1x128", is_flipped
    raise node.refuse(
        f"a scale of shape {tuple(scale.shape)} on axis {axis} in blocks of {block} is not read",
        "use one scale, one a channel of a matrix, or blocks of 128",
    )


def _fp8_dtype(node: OnnxNode, zero_point: Any) -> torch.dtype:
    _check_zero_point(node, zero_point)
    code = node.get("output_dtype", 0)
    if code:
        if code not in FP8_TYPES:
            raise DtypeError(f"QuantizeLinear {node.name!r} makes {torch_dtype(code, node.name)}; only FP8 is read")
        return torch_dtype(code, node.name)
    name = "uint8" if zero_point is None else str(zero_point.dtype).removeprefix("torch.")
    if name not in _FP8_NAMES:
        raise DtypeError(f"QuantizeLinear {node.name!r} makes {name}; only float8_e4m3fn and float8_e5m2 are read")
    return _FP8_NAMES[name]


def _check_zero_point(node: OnnxNode, zero_point: Any) -> None:
    """A zero point only names the type; FP8 has no other than 0."""
    if isinstance(zero_point, np.ndarray) and np.any(zero_point.astype(np.float32) != 0):
        raise node.refuse("its zero point is not 0", "FP8 is symmetric")


READERS: dict[str, Callable[..., Any]] = {
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(_divide),
    "Pow": _elementwise(torch.pow),
    "Where": _elementwise(torch.where),
    "Equal": _elementwise(torch.eq),
    "Less": _elementwise(torch.lt),
    "LessOrEqual": _elementwise(torch.le),
    "Greater": _elementwise(torch.gt),
    "GreaterOrEqual": _elementwise(torch.ge),
    "And": _elementwise(torch.logical_and),
    **{
        op_type: _elementwise(getattr(torch, "logical_not" if op_type == "Not" else op_type.lower()))
        for op_type in ("Not", "Neg", "Sqrt", "Reciprocal", "Exp", "Erf", "Sigmoid", "Tanh", "Cos", "Sin")
    },
    "Identity": lambda _node, x: x,
    "Shape": lambda _node, x: np.asarray(list(x.shape), dtype=np.int64),
    "Cast": lambda node, x: x.to(torch_dtype(node.get("to", 1), f"Cast {node.name!r}")),
    "Reshape": _reshape,
    "Transpose": lambda node, x: x.permute(node.get("perm", list(range(x.dim()))[::-1])),
    "Unsqueeze": _unsqueeze,
    "Squeeze": lambda node, x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(node.ints(axes, "axes"))),
    "Flatten": _flatten,
    "Expand": lambda node, x, shape: x.expand(torch.broadcast_shapes(x.shape, node.ints(shape, "shape"))),
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Gather": _gather,
    "MatMul": lambda _node, a, b: torch.matmul(a, b),
    "Gemm": _gemm,
    "Softmax": lambda node, x: torch.softmax(x, node.get("axis", -1)),
    "ReduceMean": lambda node, x, axes=None: x.mean(
        list(range(x.dim())) if axes is None else node.ints(axes, "axes"), keepdim=bool(node.get("keepdims", 1))
    ),
    "LayerNormalization": lambda node, x, weight, bias=None: F.layer_norm(
        x, _norm_width(node, x), weight, bias, node.get("epsilon", 1e-5)
    ),
    "RMSNormalization": lambda node, x, weight: F.rms_norm(x, _norm_width(node, x), weight, node.get("epsilon", 1e-5)),
    "Gelu": lambda node, x: F.gelu(x, approximate=node.get("approximate", b"none").decode()),
    "Swish": _swish,
    "Attention": _attention,
    "Trilu": lambda node, x, diagonal=None: (x.triu if node.get("upper", 1) else x.tril)(
        0 if diagonal is None else node.ints(diagonal, "diagonal")[0]
    ),
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
}
