"""ONNX in and out: numbers of the ONNX project's own evaluator, files as other exporters write them, clear refusals."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.errors import BackendError, ConfigError, DtypeError
from octavo.numerics.analysis import sqnr
from octavo.qdq import dequantize, fuse, quantize, quantize_dynamic
from tests.assertions import assert_raises
from tests.qdq.graphs import Body, export, pair, randn

onnx = pytest.importorskip("onnx")

from onnx import TensorProto as T  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from octavo.qdq.onnx import from_onnx, to_onnx  # noqa: E402
from octavo.qdq.onnx.tensors import to_torch, write_tensor  # noqa: E402

X = randn(2, 4, 16)
W = randn(8, 16, seed=1)
PLAIN: dict[str, Body] = {
    "elementwise": lambda m, x: (x * 2 - x / 3 + 1).tanh() + x.sigmoid() * x.neg().exp() + x.cos() * x.sin(),
    "norms": lambda m, x: F.rms_norm(x, (16,), m.w[0]) + F.layer_norm(x, (16,), m.w[0], m.w[1]),
    "spelled norm": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "activations": lambda m, x: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.softmax(x, -1),
    "shapes": lambda m, x: x.unflatten(2, (4, 4)).permute(2, 0, 1, 3).unsqueeze(1).expand(4, 3, 2, 4, 4).flatten(1),
    "cuts": lambda m, x: torch.cat([x[..., ::2], x.chunk(2, -1)[1], x.split([8, 4, 4], -1)[0]], -1)[:, 1],
    "repeats": lambda m, x: x.repeat_interleave(3, 1).repeat_interleave(2, dim=-1).repeat_interleave(2),
    "stack": lambda m, x: torch.stack((x.sin(), x.cos()), -1).flatten(-2),
    "products": lambda m, x: torch.addmm(m.w[:, 0], x[0], m.w.t()) + F.linear(x, m.w, m.w[:, 1]) + (x @ m.w.t()),
    "attention": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "mask": lambda m, x: torch.where(m.w[:4, :4] > 0, x @ x.transpose(1, 2), -1e9).softmax(-1),
}  # fmt: skip


def evaluate(model: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """By the ONNX project's reference evaluator."""
    feeds = {value.name: x.numpy() for value, x in zip(model.graph.input, inputs, strict=True)}
    return to_torch(ReferenceEvaluator(model).run(None, feeds)[0])


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_written_means_the_same(name: str) -> None:
    """To ONNX's evaluator, and back to torch."""
    program = export(PLAIN[name], X, w=W)
    wanted = program.module()(X)
    model = to_onnx(program)
    assert sqnr(wanted, evaluate(model, X)) >= 100.0
    assert sqnr(wanted, from_onnx(model).module()(X)) >= 120.0


def test_pairs_mean_the_same() -> None:
    """Bitwise with power-of-two scales, for which ONNX's division and octavo's product agree."""

    def body(m, x):  # type: ignore[no-untyped-def]
        rows = dequantize(quantize(m.w, m.rows, kind="per_row"), m.rows, kind="per_row")
        return F.linear(pair(x, 2.0**-6), rows), pair(x, 2.0**-7)

    rows = (2.0 ** torch.arange(-9, -1)).reshape(8, 1)
    program = export(body, X, w=W, rows=rows)
    model = to_onnx(program)
    wanted = program.module()(X)
    found = [to_torch(part) for part in ReferenceEvaluator(model).run(None, {model.graph.input[0].name: X.numpy()})]
    assert sqnr(wanted[0], found[0]) >= 120.0
    assert torch.equal(found[1], wanted[1])
    again = from_onnx(model)
    assert all(torch.equal(a, b) for a, b in zip(again.module()(X), wanted, strict=True))
    stored = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}
    assert stored == {T.FLOAT8E4M3FN}
    module, report = fuse(again)
    assert report.count("scaled_mm") == 1
    assert sqnr(wanted[0], module(X)[0]) >= 100.0


def test_outputs_that_stand_twice_stay_two() -> None:
    program = export(lambda m, x: ((y := x + 1), x, y), X)
    found = from_onnx(to_onnx(program)).module()(X)
    assert [torch.equal(a, b) for a, b in zip(found, (X + 1, X, X + 1), strict=True)] == [True] * 3


def test_blocks_of_128() -> None:
    scale = (2.0 ** torch.arange(-8, 0)).reshape(4, 2)
    body: Body = lambda m, x: dequantize(quantize(x, m.scale, kind="block_1x128"), m.scale, kind="block_1x128")  # noqa: E731
    x = randn(4, 256)
    program = export(body, x, scale=scale)
    model = to_onnx(program)
    assert torch.equal(evaluate(model, x), program.module()(x))
    assert torch.equal(from_onnx(model).module()(x), program.module()(x))


def test_a_large_model_keeps_its_weights_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.qdq.onnx.writing.MAX_FILE_BYTES", 100)
    program = export(lambda m, x: F.linear(pair(x), pair(m.w)), X, w=randn(256, 16))
    model = to_onnx(program, tmp_path / "large.onnx")
    assert (tmp_path / "large.onnx.data").stat().st_size >= 256 * 16
    assert all(tensor.raw_data for tensor in model.graph.initializer)
    assert torch.equal(from_onnx(tmp_path / "large.onnx").module()(X), from_onnx(model).module()(X))


def make_model(
    nodes: list[Any], initializers: dict[str, np.ndarray], *, opset: int = 19, shape: Any = (2, 4, 16)
) -> Any:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", T.FLOAT, shape)],
        [helper.make_tensor_value_info("y", T.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def fp8(array: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return array.astype(ml_dtypes.float8_e4m3fn)


def test_a_file_as_exporters_write_it() -> None:
    """Opset 19: zero points, weights [K, N] as FP8 initializers with one scale a column, RMSNorm spelled out."""
    nodes = [
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Pow", ["x", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square", "last"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "eps"], ["spread"]),
        helper.make_node("Sqrt", ["spread"], ["root"]),
        helper.make_node("Div", ["x", "root"], ["normed"]),
        helper.make_node("Mul", ["normed", "gamma"], ["scaled"]),
        helper.make_node("QuantizeLinear", ["scaled", "x_scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "x_scale", "zero"], ["decoded"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale"], ["weight"], axis=1),
        helper.make_node("MatMul", ["decoded", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["hidden"]),
        helper.make_node("Shape", ["hidden"], ["sizes"]),
        helper.make_node("Reshape", ["hidden", "sizes"], ["y"]),
    ]
    values = {"last": np.array([-1]), "gamma": W[0].numpy(), "zero": fp8(np.zeros(())), "bias": W[:, 0].numpy()}
    values |= {"eps": np.float32(1e-5).reshape(()), "x_scale": np.float32(0.02).reshape(())}
    values |= {"w": fp8(W.t().numpy()), "w_scale": np.linspace(0.5, 2, 8, dtype=np.float32)}
    model = make_model(nodes, values)
    program = from_onnx(model)
    assert sqnr(evaluate(model, X), program.module()(X)) >= 60.0
    module, report = fuse(program)
    assert [site.op for site in report.fused] == ["norm_quantize", "scaled_mm"]
    assert report.left_over == []
    assert sqnr(program.module()(X), module(X)) >= 100.0


def test_rope_with_shapes_from_the_model() -> None:
    """Slices, Gathers and Unsqueezes of constants are made while reading."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["length"], axis=0),
        helper.make_node("Unsqueeze", ["length", "zero_axis"], ["end"]),
        helper.make_node("Slice", ["table", "zero_axis", "end", "zero_axis"], ["cos"]),
        helper.make_node("Split", ["x"], ["first", "second"], axis=-1, num_outputs=2),
        helper.make_node("Neg", ["second"], ["turned"]),
        helper.make_node("Concat", ["turned", "first"], ["rotated"], axis=-1),
        helper.make_node("Mul", ["rotated", "cos"], ["y"]),
    ]
    table = randn(9, 16, seed=3)
    model = make_model(nodes, {"one": np.array(1), "zero_axis": np.array([0]), "table": table.numpy()})
    wanted = torch.cat((-X[..., 8:], X[..., :8]), -1) * table[:4]
    assert torch.equal(from_onnx(model).module()(X), wanted)


def node(op: str, inputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(op, inputs, ["y"], name="here", **attributes)


ONE, ZERO8 = np.float32(1).reshape(()), np.zeros((), dtype=np.uint8)
REFUSED = {
    "operator": (node("Celu", ["x"]), {}, {}, ConfigError, "does not read Celu; it reads Add"),
    "domain": (node("Add", ["x", "x"], domain="com.me"), {}, {}, ConfigError, "does not read Add"),
    "uint8": (node("QuantizeLinear", ["x", "s", "z"]), {"s": ONE, "z": ZERO8}, {}, DtypeError, "UINT8"),
    "no zero point": (node("QuantizeLinear", ["x", "s"]), {"s": ONE}, {}, DtypeError, "makes uint8"),
    "wraps": (node("QuantizeLinear", ["x", "s", "z"], saturate=0), {"s": ONE, "z": fp8(np.zeros(()))}, {},
              ConfigError, "QuantizeLinear 'here': it does not saturate"),
    "a channel of 3 dims": (node("QuantizeLinear", ["x", "s", "z"]),
                            {"s": np.ones(4, np.float32), "z": fp8(np.zeros(4))}, {}, ConfigError, "on axis 1"),
    "opset": (node("Neg", ["x"]), {}, {"opset": 17}, ConfigError, "opset 19 or later, got 17"),
    "symbolic": (node("Neg", ["x"]), {}, {"shape": ("batch", 4)}, ConfigError, "symbolic dim 'batch'"),
    "computed shape": (node("Reshape", ["x", "x"]), {}, {}, ConfigError, "its shape is computed by the model"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_named(name: str) -> None:
    call, values, options, error, text = REFUSED[name]
    assert_raises(error, text, from_onnx, make_model([call], values, **options))


READ: dict[str, tuple[list[Any], dict[str, np.ndarray]]] = {
    "indices from the end": ([node("Gather", ["x", "c"], axis=1)], {"c": np.array([-1, 0])}),
    "an axis from the end": ([node("Gather", ["x", "c"], axis=-1)], {"c": np.array([3, 0])}),
    "flat but for a dim of 1": ([node("Flatten", ["x"], axis=2)], {}),
    "a constant first": ([node("Less", ["c", "x"])], {"c": np.float32(0.5)}),
    "a constant of more dims": ([node("Add", ["c", "x"])], {"c": np.ones((1, 1, 1), np.float32)}),
    "constants of 16 bits": (
        [helper.make_node("Less", ["x", "c"], ["less"]), node("Where", ["less", "a", "b"])],
        {"c": np.float32(0.5), "a": np.float16(1), "b": np.float16(2)},
    ),
    "whole numbers": (
        [helper.make_node("Cast", ["x"], ["whole"], to=T.INT64), node("Div", ["whole", "c"])],
        {"c": np.int64(2)},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_means_the_same(name: str) -> None:
    """Values, shape and dtype of ONNX's evaluator."""
    nodes, values = READ[name]
    model, x = make_model(nodes, {key: np.asarray(value) for key, value in values.items()}, shape=(4, 16)), 4 * X[0]
    wanted, found = evaluate(model, x), from_onnx(model).module()(x)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(found, wanted)


def test_an_operator_of_another_domain_is_not_read_as_onnxs() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["z"], domain="com.example"), helper.make_node("Neg", ["z"], ["y"])]
    assert_raises(ConfigError, "does not read Neg", from_onnx, make_model(nodes, {}))


def test_a_symbolic_dim_with_a_size() -> None:
    program = from_onnx(make_model([node("Neg", ["x"])], {}, shape=("batch", 4)), dims={"batch": 3})
    assert program.module()(torch.ones(3, 4)).sum() == -12


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda m, x: x.cumsum(0), "does not write aten.cumsum"),
        (lambda m, x: torch.add(x, x, alpha=2), "alpha"),
        (lambda m, x: quantize_dynamic(x)[0].float(), "quantize_dynamic"),
        (lambda m, x: pair(x, x.exp().mean([0, 1, 2])), "scale is computed"),
    ],
    ids=["op", "alpha", "dynamic", "computed scale"],
)
def test_what_is_not_written_is_named(body: Body, text: str) -> None:
    assert_raises(ConfigError, text, to_onnx, export(body, X))


def test_a_dynamic_shape_is_not_written() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    program = torch.export.export(Doubled(), (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_raises(ConfigError, "dynamic shape", to_onnx, program)


def test_older_opsets_are_not_written() -> None:
    assert_raises(ConfigError, "opset 23 or later, got 19", to_onnx, export(lambda m, x: x + x, X), opset=19)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32], ids=str)
def test_tensors_keep_their_bits(dtype: torch.dtype) -> None:
    bits = torch.arange(256).to(torch.uint8)
    value = bits.view(dtype).reshape(2, -1)
    back = to_torch(numpy_helper.to_array(write_tensor("t", value)))
    assert back.dtype == dtype
    assert torch.equal(back.reshape(-1).view(torch.uint8), bits)


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "octavo.qdq.onnx")
    with pytest.raises(BackendError, match=r"needs the package onnx; run pip install -e '\.\[onnx\]' in"):
        importlib.import_module("octavo.qdq.onnx")
