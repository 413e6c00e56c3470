"""`to_onnx`: an exported program with Q/DQ pairs as an ONNX graph, weights already quantized stored as FP8."""

from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from octavo.errors import ConfigError
from octavo.qdq.graph import DEQUANTIZE, Rewriter, describe, is_call, val_of
from octavo.qdq.onnx.tensors import onnx_dtype, write_tensor
from octavo.qdq.onnx.write_operators import WRITERS
from octavo.qdq.spelling import adopt_decomposed_pairs, drop_no_ops, views_to_reshapes

MIN_OPSET, DEFAULT_OPSET = 23, 23  # with RMSNormalization, Attention and scales of another type than the values
MAX_FILE_BYTES = 1 << 30  # a protobuf ends at 2 GiB
_IR_VERSION = 11


def to_onnx(program: ExportedProgram, path: str | Path | None = None, *, opset: int = DEFAULT_OPSET) -> onnx.ModelProto:
    """Write a program with octavo.qdq's pairs as ONNX, its pairs as QuantizeLinear and DequantizeLinear.

    A Q of a constant is made now: the file holds FP8 weights behind DequantizeLinear.

    Args:
        program: from torch.export.export of a model in eval mode, with static shapes. It is not changed.
        path: where to write it, more than a GiB of weights into a second file beside it; None writes nothing.
        opset: 23 or later.
    Returns:
        The model, checked by onnx.checker.
    Raises:
        ConfigError: an op that is not written (all of them named), a dynamic shape, an older opset.
    """
    if opset < MIN_OPSET:
        raise ConfigError(f"to_onnx writes opset {MIN_OPSET} or later, got {opset}")
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule), "torch.export unlifts to a GraphModule"
    rewriter = Rewriter(module)
    drop_no_ops(rewriter)
    views_to_reshapes(rewriter)
    adopt_decomposed_pairs(rewriter, accept_quantize=False)
    rewriter.graph.eliminate_dead_code()
    writer = GraphWriter(rewriter)
    model = helper.make_model(
        writer.write(), opset_imports=[helper.make_opsetid("", opset)], ir_version=_IR_VERSION, producer_name="octavo"
    )
    if path is None:
        onnx.checker.check_model(model)
    else:
        _save(model, Path(path))
    return model


def _save(model: onnx.ModelProto, path: Path) -> None:
    """Write and check a model; what one protobuf cannot hold goes into PATH.data beside it."""
    is_large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_FILE_BYTES
    if is_large:  # onnx's own function would move the weights out of the caller's model
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        onnx.save(copy, str(path), save_as_external_data=True, location=f"{path.name}.data")
    else:
        onnx.save(model, str(path))
    onnx.checker.check_model(str(path))


class GraphWriter:
    """One graph on its way to ONNX: names, constants and nodes so far."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._names: dict[Node, str] = {}
        self._below_pair: dict[Node, bool] = {}

    def write(self) -> onnx.GraphProto:
        """The whole graph."""
        graph = self.rewriter.graph
        self._check(graph)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        for node in inputs:
            self._names[node] = node.name
        for node in self.rewriter.nodes():
            if node.target in WRITERS and not self.is_constant(node):
                WRITERS[node.target](self, node)
        outputs: list[Node] = []
        torch.fx.map_arg(graph.output_node().args, outputs.append)  # all_input_nodes has each node once
        names = [self._output(node, index) for index, node in enumerate(outputs)]
        return helper.make_graph(
            self.nodes,
            "octavo",
            [_value_info(node.name, node) for node in inputs],
            [_value_info(name, node) for name, node in zip(names, outputs, strict=True)],
            self.initializers,
        )

    def is_constant(self, node: Node) -> bool:
        """Whether a node becomes an initializer: known now, and no DQ before it that would be lost."""
        return self.rewriter.value(node) is not None and not self._is_below_pair(node)

    def _is_below_pair(self, node: Node) -> bool:
        if node not in self._below_pair:
            sources = node.all_input_nodes
            self._below_pair[node] = is_call(node, DEQUANTIZE) or any(self._is_below_pair(part) for part in sources)
        return self._below_pair[node]

    def name(self, node: Node) -> str:
        """The name under which a node's value is read; a constant's initializer is made on the first read."""
        if node not in self._names:
            value = self.rewriter.value(node)
            assert value is not None, f"{node.name} is read before it is written"
            self._names[node] = self.constant(value, node.name)
        return self._names[node]

    def bind(self, node: Node, name: str) -> None:
        """Let a node's value be read under a name."""
        self._names[node] = name

    def constant(self, value: torch.Tensor, hint: str = "constant") -> str:
        """A new initializer."""
        name = f"{hint}.{len(self.initializers)}"
        self.initializers.append(write_tensor(name, value))
        return name

    def ints(self, values: list[int]) -> str:
        """A new int64 vector."""
        return self.constant(torch.tensor(values, dtype=torch.int64), "ints")

    def emit(self, op_type: str, inputs: list[str], output: Node | str, **attributes: Any) -> str:
        """A node; returns its output's name: the graph node's own, or a new one that begins like `output`."""
        name = output.name if isinstance(output, Node) else f"{output}.{len(self.nodes)}"
        self._append(op_type, inputs, [name], attributes)
        if isinstance(output, Node):
            self._names[output] = name
        return name

    def emit_parts(self, op_type: str, inputs: list[str], node: Node, count: int, **attributes: Any) -> list[str]:
        """A node of several outputs; returns their names."""
        outputs = [f"{node.name}.{index}" for index in range(count)]
        self._append(op_type, inputs, outputs, attributes)
        return outputs

    def _append(self, op_type: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
        name = f"{op_type}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **attributes))

    def _output(self, node: Node, index: int) -> str:
        """An output under a name of its own, also where it is an input, a constant, or stands twice."""
        name = f"output_{index}"
        self.nodes.append(helper.make_node("Identity", [self.name(node)], [name], name=f"Identity.{name}"))
        return name

    def _check(self, graph: torch.fx.Graph) -> None:
        calls = [node for node in self.rewriter.nodes() if not self.is_constant(node)]
        unknown = sorted({describe(node) for node in calls if node.target not in WRITERS})
        if unknown:
            raise ConfigError(f"to_onnx does not write {', '.join(unknown)}; express it by other ops")
        for node in graph.nodes:
            values = node.meta.get("val")
            shaped = [part for part in (values if isinstance(values, tuple | list) else [values]) if part is not None]
            if any(not isinstance(size, int) for part in shaped for size in getattr(part, "shape", ())):
                raise ConfigError(f"{node.name} has a dynamic shape; export with static shapes for ONNX")


def _value_info(name: str, node: Node) -> onnx.ValueInfoProto:
    val = val_of(node)
    return helper.make_tensor_value_info(name, onnx_dtype(val.dtype), list(val.shape))
