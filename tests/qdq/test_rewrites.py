"""Products of pairs run on codes, and `fuse` as a whole: what it merges, leaves, and says about it."""

import pytest
import torch
import torch.nn.functional as F

from octavo.numerics.analysis import sqnr
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize as quantize_op
from octavo.qdq import dequantize, fuse, quantize
from octavo.qdq.fused import fp8_linear
from octavo.qdq.gemms import fuse_gemms, join_weights
from octavo.qdq.graph import DEQUANTIZE, Rewriter
from octavo.qdq.moves import move_pairs
from octavo.qdq.report import Report
from octavo.qdq.spelling import normalize_spelling
from octavo.testing.tolerances import QDQ_BF16_PRODUCT_DB
from tests.qdq.graphs import (
    BIAS,
    ROW_SCALE,
    SCALE,
    Body,
    K,
    N,
    W,
    X,
    count,
    dynamic_pair,
    export,
    pair,
    randn,
    rewriter_of,
    row_pair,
    run,
)

PRODUCTS: dict[str, Body] = {
    "linear": lambda m, x: F.linear(pair(x), pair(m.w)),
    "linear with bias": lambda m, x: F.linear(pair(x), pair(m.w), m.bias),
    "matmul of a transpose": lambda m, x: pair(x) @ pair(m.w).t(),
    "matmul of [K, N]": lambda m, x: pair(x) @ pair(m.w.t()),
    "matmul and add": lambda m, x: pair(x) @ pair(m.w.t()) + m.bias,
    "addmm": lambda m, x: torch.addmm(m.bias, pair(x.flatten(0, 1)), pair(m.w).t()),
    "mm": lambda m, x: torch.mm(pair(x)[0], pair(m.w).t()),
    "per row weight": lambda m, x: F.linear(pair(x), row_pair(m.w, m.rows), m.bias),
    "per row weight, transposed": lambda m, x: pair(x) @ row_pair(m.w, m.rows).transpose(0, 1),
    "dynamic rows": lambda m, x: F.linear(dynamic_pair(x, "per_row"), row_pair(m.w, m.rows)),
    "dynamic tensor": lambda m, x: F.linear(dynamic_pair(x, "per_tensor"), pair(m.w)),
    "dynamic weight, per row": lambda m, x: F.linear(dynamic_pair(x, "per_row"), dynamic_pair(m.w, "per_row"), m.bias),
    "dynamic weight, per tensor": lambda m, x: F.linear(pair(x), dynamic_pair(m.w, "per_tensor")),
    "dynamic weight, transposed": lambda m, x: pair(x) @ dynamic_pair(m.w, "per_row").t(),
    "input rearranged after DQ": lambda m, x: F.linear(pair(x.reshape(5, 2, K)).transpose(0, 1), pair(m.w)),
}


def fuse_alike(body: Body, x: torch.Tensor, **buffers: torch.Tensor) -> tuple[torch.nn.Module, Report]:
    """fuse, and the fused graph computes what the pairs do."""
    program = export(body, x, **buffers)
    module, report = fuse(program)
    assert sqnr(program.module()(x), module(x)) >= 100.0
    return module, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_on_codes(name: str, dtype: torch.dtype) -> None:
    """Equal up to the rounding of the decoded operands to bf16, where they are bf16, and the order of sums."""
    x, buffers = X.to(dtype), {"w": W.to(dtype), "bias": BIAS.to(dtype), "rows": ROW_SCALE}
    rewriter = rewriter_of(PRODUCTS[name], x, **buffers)
    wanted = run(rewriter, x)
    normalize_spelling(rewriter)
    move_pairs(rewriter)
    fuse_gemms(rewriter)
    assert count(rewriter, fp8_linear) == 1
    assert count(rewriter, DEQUANTIZE) == 0
    assert count(rewriter, torch.ops.aten.add.Tensor) == 0
    found = run(rewriter, x)
    assert found.dtype == dtype
    assert sqnr(wanted, found) >= (100.0 if dtype == torch.float32 else QDQ_BF16_PRODUCT_DB)


def test_a_dynamic_weight_is_quantized_once_and_stored_as_codes() -> None:
    body: Body = lambda m, x: F.linear(dynamic_pair(x, "block_1x128"), dynamic_pair(m.w, "block_1x128"))  # noqa: E731
    x, w = randn(3, 256), randn(128, 256, seed=1)
    module, report = fuse_alike(body, x, w=w)
    assert (report.count("scaled_mm"), [left.op for left in report.left_over]) == (1, ["Q"])
    assert any("made now, stored as FP8 with its scale" in line for line in report.moved)
    assert all(buffer.dtype in (torch.float8_e4m3fn, torch.float32) for buffer in module.buffers())
    assert not any(buffer.shape == w.shape and buffer.dtype == torch.float32 for buffer in module.buffers())


def test_a_block_scaled_product() -> None:
    x, w = randn(3, 256), randn(128, 256, seed=1)
    stored = quantize_op(w, Scaling.block_128x128())
    kinds = {"kind": "block_128x128"}
    body: Body = lambda m, x: F.linear(dynamic_pair(x, "block_1x128"), dequantize(m.codes, m.scale, **kinds))  # noqa: E731
    _, report = fuse_alike(body, x, codes=stored.qdata, scale=stored.scale)
    assert (report.count("scaled_mm"), [left.op for left in report.left_over]) == (1, ["Q"])


NOT_FUSED = {
    "weight not quantized": (lambda m, x: F.linear(pair(x), m.w), "second operand is not dequantized"),
    "input not quantized": (lambda m, x: F.linear(x, pair(m.w)), "first operand of aten.linear is not dequantized"),
    "two activations": (lambda m, x: pair(x) @ pair(x).transpose(1, 2), "product of two activations"),
    "rows along K": (lambda m, x: pair(x) @ row_pair(m.w.t().contiguous(), m.of_k), "run along the summed dim"),
    "alpha": (lambda m, x: torch.addmm(m.bias, pair(x)[0], pair(m.w).t(), alpha=2), "addmm scales its terms"),
    "no pair of kinds": (lambda m, x: F.linear(dynamic_pair(x, "block_1x128"), pair(m.w)), "block_1x128 x per_tensor"),
    "rows through transpose": (
        lambda m, x: F.linear(dynamic_pair(x[0].t(), "per_row").t(), pair(m.w)),
        "per_row scale does not pass through aten.t",
    ),
    "read by a sine": (lambda m, x: pair(x).sin(), "aten.sin reads high precision"),
    "another scale": (lambda m, x: pair(pair(x), 3 * SCALE).sin(), "quantized again with another scale"),
    "an output": (lambda m, x: pair(x), "the graph's output reads high precision"),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_left_says_why(name: str) -> None:
    body, reason = NOT_FUSED[name]
    buffers = {"w": W, "bias": BIAS, "of_k": torch.full((K, 1), 0.03)}
    _, report = fuse_alike(body, X, **buffers)
    assert report.count("scaled_mm") == 0
    reasons = [left.reason for left in report.left_over if left.op == "DQ"]
    assert any(reason in text for text in reasons), reasons
    assert all(left.remedy for left in report.left_over)
    assert reason in str(report)


def test_products_of_one_input_are_merged() -> None:
    """Equal weight scales stay one; others become one a row; biases are stacked with zeros."""

    def body(m, x):  # type: ignore[no-untyped-def]
        x = pair(x)
        return F.linear(x, pair(m.w)) + F.linear(x, pair(m.v), m.bias) + F.linear(x, pair(m.u, 2 * SCALE))

    _, report = fuse_alike(body, X, w=W, v=randn(N, K, seed=3), u=randn(N, K, seed=4), bias=BIAS)
    assert report.count("scaled_mm") == 1


def test_joined_weights_keep_their_scales() -> None:
    from octavo.qdq.gemms import Weight

    a, b = (Weight(quantize(W, s), torch.full((1, 1), s), "per_tensor") for s in (0.01, 0.02))
    assert join_weights([a, a]).kind == "per_tensor"  # type: ignore[union-attr]
    joined = join_weights([a, b])
    assert joined is not None
    assert joined.kind == "per_row"
    assert joined.scale.flatten().tolist() == pytest.approx([0.01] * N + [0.02] * N)
    block = Weight(a.codes, torch.ones(1, 1), "block_128x128")
    assert join_weights([block, block]) is None  # 32 rows: the second would begin within a block
    assert join_weights([a, block]) is None


GAMMA = 1 + 0.1 * randn(K, seed=5)

LONE_Q = {
    "attention": (lambda m, x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention writes no FP8"),
    "exact gelu": (lambda m, x: F.gelu(x), "this one is erf's"),
    "gelu read twice": (lambda m, x: F.gelu(x, approximate="tanh"), "also read in high precision"),
    "norm of two dims": (lambda m, x: F.layer_norm(x, (5, K)), "several dims"),
    "up before gate": (lambda m, x: F.silu((h := x.chunk(2, -1))[1]) * h[0], "up half stands before the gate's"),
    "no halves": (lambda m, x: F.silu(x) * x.cos(), "no two halves"),
}


@pytest.mark.parametrize("name", LONE_Q)
def test_a_lone_quantize_says_why(name: str) -> None:
    body, reason = LONE_Q[name]

    def whole(m, x):  # type: ignore[no-untyped-def]
        y = body(m, x)
        product = F.linear(pair(y), pair(m.narrow if y.shape[-1] != K else m.w))
        return product + y[..., :N] if name == "gelu read twice" else product

    _, report = fuse_alike(whole, X, w=W, narrow=W[:, :N].contiguous())
    assert [(left.op, left.runs_as) for left in report.left_over] == [("Q", "quantize")]
    assert reason in report.left_over[0].reason
    assert report.count("scaled_mm") == 1


def test_a_computed_scale_is_left_and_named() -> None:
    """Its Q stays as it is; the product still runs on the codes."""

    def body(m, x):  # type: ignore[no-untyped-def]
        scale = x.abs().amax() / 448
        return F.linear(dequantize(quantize(x, scale), scale), pair(m.w))

    _, report = fuse_alike(body, X, w=W)
    assert [(left.op, left.runs_as) for left in report.left_over] == [("Q", "qdq_quantize")]
    assert "computed in the graph" in report.left_over[0].reason
    assert report.count("scaled_mm") == 1


def test_a_dynamic_quantize_joins_its_norm() -> None:
    def body(m, x):  # type: ignore[no-untyped-def]
        normed = dynamic_pair(F.rms_norm(x, (K,), m.gamma, 1e-5), "per_row")
        return F.linear(normed, row_pair(m.w, m.rows))

    _, report = fuse_alike(body, X, w=W, gamma=GAMMA, rows=ROW_SCALE)
    assert [site.op for site in report.fused] == ["norm_quantize", "scaled_mm"]
    assert report.left_over == []


def decomposed(x: torch.Tensor) -> torch.Tensor:
    from torch.ao.quantization.fx import _decomposed  # noqa: F401  (it registers the ops)

    ops, args = torch.ops.quantized_decomposed, (SCALE, 0, -448, 448, torch.float8_e4m3fn)
    return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *args), *args)


@pytest.mark.parametrize("accepted", [False, True])
def test_torchs_own_pairs(accepted: bool) -> None:
    """They round to whole numbers first: taken only when asked for."""
    program = export(lambda m, x: F.linear(decomposed(x), pair(m.w)), X, w=W)
    module, report = fuse(program, accept_decomposed=accepted)
    assert report.count("scaled_mm") == 1
    if accepted:
        assert torch.equal(module(X), fuse(export(lambda m, x: F.linear(pair(x), pair(m.w)), X, w=W))[0](X))
    else:
        assert "rounds to whole numbers" in report.left_over[0].reason
        assert sqnr(program.module()(X), module(X)) >= 100.0


def test_no_ops_are_dropped() -> None:
    def body(m, x):  # type: ignore[no-untyped-def]
        y = F.dropout(pair(x.contiguous().to(torch.float32)), 0.5, training=False).clone()
        return F.linear(y, pair(m.w).detach())

    assert fuse(export(body, X, w=W))[1].count("scaled_mm") == 1


def test_the_callers_model_is_left_alone() -> None:
    """Weights that only products read are gone from the fused module, not from the model."""
    linear = torch.nn.Linear(K, N)
    program = torch.export.export(Wrapped(linear), (X,))
    module, _ = fuse(program)
    stored = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all(value.dtype != torch.float32 or value.numel() <= N for value in stored.values())
    assert linear.weight.requires_grad
    assert not any(value.requires_grad for value in stored.values())


class Wrapped(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(pair(x), pair(self.linear.weight), self.linear.bias)


def test_a_dynamic_batch_stays_dynamic() -> None:
    model = Wrapped(torch.nn.Linear(K, N))
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    module, report = fuse(program)
    x = randn(7, 5, K)
    assert report.count("scaled_mm") == 1
    with torch.no_grad():
        assert sqnr(model(x), module(x)) >= 100.0


def test_rewriter_survives_dead_readers() -> None:
    """A Q whose result nobody reads is dropped before anything is rewritten."""
    program = export(lambda m, x: (pair(x), x.sin())[1], X)
    module, report = fuse(program)
    assert (report.fused, report.left_over) == ([], [])
    assert isinstance(Rewriter(module), Rewriter)
    assert torch.equal(module(X), X.sin())
