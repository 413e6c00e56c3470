"""`from_onnx`: an ONNX graph run operator by operator under torch.export, so that `fuse` sees what a torch model gives.

Values that are known without running the model (shapes, axes, small constants) stay numpy arrays.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.export import ExportedProgram

from octavo.errors import ConfigError
from octavo.qdq.onnx.read_operators import READERS, OnnxNode, Value
from octavo.qdq.onnx.tensors import read_array, to_torch, torch_dtype

MIN_OPSET = 19  # FP8 came to QuantizeLinear with it
_OF_CONSTANTS = ("Constant", "ConstantOfShape", "Range")  # read where their inputs are known


def from_onnx(
    source: str | Path | onnx.ModelProto, *, dims: Mapping[str, int] | None = None, device: str = "cpu"
) -> ExportedProgram:
    """Read an ONNX model, its QuantizeLinear and DequantizeLinear as octavo.qdq's pairs.

    QuantizeLinear divides by its scale, octavo multiplies by the scale's fp32 reciprocal: a code may differ by one step
    where a quotient lies within an ulp of the middle between two codes; with a power of two never.

    Args:
        source: a file (external data beside it) or a model in memory, opset 19 or later.
        dims: sizes of symbolic dims, by name.
        device: of the weights.
    Returns:
        A program of the graph's inputs in order, with static shapes; it returns the one output, or a tuple of several.
    Raises:
        ConfigError: an operator that is not read (all of them named), a symbolic dim without a size, an older opset.
        DtypeError: an element type that is not read.
    """
    model = onnx.load(source) if isinstance(source, str | Path) else source
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < MIN_OPSET:
        raise ConfigError(
            f"from_onnx reads opset {MIN_OPSET} or later, got {opset}; convert it with onnx.version_converter"
        )
    _check_operators(model.graph)
    module = OnnxModule(model.graph).to(device).eval()
    examples = tuple(_example(value, dims or {}, device) for value in module.inputs)
    with torch.no_grad():
        return torch.export.export(module, examples)


class OnnxModule(nn.Module):
    """An ONNX graph as a module; large constants are its buffers."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        super().__init__()
        self.nodes = [OnnxNode.read(node) for node in graph.node]
        self.protos = list(graph.node)
        self.known: dict[str, np.ndarray] = {}
        self.buffer_names: dict[str, str] = {}
        for tensor in graph.initializer:
            array = read_array(tensor)
            if _stays_numpy(array):
                self.known[tensor.name] = array
            else:
                self.buffer_names[tensor.name] = f"initializer_{len(self.buffer_names)}"
                self.register_buffer(self.buffer_names[tensor.name], to_torch(array))
        self.inputs = [value for value in graph.input if value.name not in self.known | self.buffer_names]
        self.outputs = [value.name for value in graph.output]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The graph's inputs in order -> its outputs, or its one output."""
        values: dict[str, Value] = dict(self.known)
        values |= {name: getattr(self, buffer) for name, buffer in self.buffer_names.items()}
        values |= {value.name: x for value, x in zip(self.inputs, inputs, strict=True)}
        for node, proto in zip(self.nodes, self.protos, strict=True):
            operands = [values[name] if name else None for name in node.inputs]
            if node.op_type not in _OF_CONSTANTS and any(isinstance(operand, torch.Tensor) for operand in operands):
                results = READERS[node.op_type](node, *operands)
            else:
                results = _compute_now(node, proto, operands)
            results = results if isinstance(results, tuple) else (results,)
            values |= dict(zip(node.outputs, results, strict=False))
        results = tuple(_as_tensor(values[name]) for name in self.outputs)
        return results if len(results) > 1 else results[0]


def _compute_now(node: OnnxNode, proto: onnx.NodeProto, operands: list[Any]) -> tuple[np.ndarray, ...]:
    """An operator of known values alone."""
    if any(isinstance(operand, torch.Tensor) for operand in operands):
        raise node.refuse("its operands are computed by the model", "make them constants")
    feeds = {name: operand for name, operand in zip(node.inputs, operands, strict=True) if name}
    return tuple(np.asarray(result) for result in ReferenceEvaluator(proto).run(None, feeds))


def _stays_numpy(array: np.ndarray) -> bool:
    return array.size <= 1 or array.dtype.kind in "iub"


def _as_tensor(value: Value) -> torch.Tensor:
    assert value is not None, "an output has a value"
    return value if isinstance(value, torch.Tensor) else to_torch(value)


def _check_operators(graph: onnx.GraphProto) -> None:
    known = {*READERS, *_OF_CONSTANTS}
    unknown = sorted({n.op_type for n in graph.node if n.op_type not in known or n.domain not in ("", "ai.onnx")})
    if unknown:
        raise ConfigError(
            f"from_onnx does not read {', '.join(unknown)}; it reads {', '.join(sorted(READERS))}: express it by these"
        )


def _example(value: onnx.ValueInfoProto, dims: Mapping[str, int], device: str) -> torch.Tensor:
    tensor_type = value.type.tensor_type
    shape = []
    for dim in tensor_type.shape.dim:
        size = dim.dim_value if dim.HasField("dim_value") else dims.get(dim.dim_param, 0)
        if size < 1:
            raise ConfigError(f"input {value.name!r} has the symbolic dim {dim.dim_param!r}; give its size in dims=")
        shape.append(size)
    return torch.zeros(shape, dtype=torch_dtype(tensor_type.elem_type, f"input {value.name!r}"), device=device)
