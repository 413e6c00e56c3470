"""Activations on every device: against fp64 autograd, fused equal to its parts, row-local, odd shapes and values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ConfigError, RecipeError, ShapeError
from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.activation import (
    KINDS,
    activation,
    activation_backward,
    activation_backward_quantize,
    activation_quantize,
)
from octavo.ops.quantize import quantize, quantize_both, quantize_columns
from octavo.testing import assert_bitwise, assert_sqnr, generate, tolerances
from tests.assertions import assert_codes, assert_raises

E5M2 = torch.float8_e5m2
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
# (rows, columns, is the quant_scale known)
SCALINGS = [
    (Scaling(), None, False),
    (Scaling(), Scaling.block_128x128(), False),
    (Scaling(), Scaling(), False),
    (Scaling.per_row(), None, False),
    (Scaling.per_row(), Scaling.per_row(), False),
    (Scaling.per_tensor(), Scaling.per_tensor(), False),
    (Scaling.per_tensor(), Scaling.per_tensor(), True),
    (Scaling.of_kind("mx_1x32", scale_format="e8m0"), Scaling.of_kind("mx_1x32"), False),
]
# Fused on a GPU: aligned, ragged tokens; not fused there: a ragged width.
SHAPES = [(256, 384), (63, 128), (63, 344), (1, 2)]


def inputs(kind: str, tokens: int, width: int, name: str = "normal", dtype: torch.dtype = torch.bfloat16, device="cpu"):
    """x, bias (none for swiglu) and grad."""
    halves = 2 if kind == "swiglu" else 1
    x = generate(name, (tokens, halves * width), dtype, device=device)
    bias = generate("normal", (width,), dtype, seed=1, device=device) if kind == "gelu" else None
    return x, bias, generate("normal", (tokens, width), dtype, seed=2, device=device)


def formula(x: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    if kind == "gelu":
        return F.gelu(x if bias is None else x + bias, approximate="tanh")
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def assert_same(found: QuantizedTensor | None, expected: QuantizedTensor | None, what: str) -> None:
    assert (found is None) == (expected is None), what
    if found is not None and expected is not None:
        assert found.scaling == expected.scaling
        assert_codes(found, expected, what)
        assert found.scale.stride() == expected.scale.stride(), f"strides of {what}"


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_gradients_follow_the_formula(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, bias, grad = inputs(kind, 300, 344, dtype=dtype, device=device)
    wide = [None if t is None else t.double().requires_grad_() for t in (x, bias)]
    expected = formula(wide[0], kind, wide[1])
    expected.backward(grad.double())
    floor = 110.0 if dtype == torch.float32 else tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB
    assert_sqnr(activation(x, kind=kind, bias=bias), expected.detach(), floor)
    grad_x, grad_bias = activation_backward(grad, x, kind=kind, bias=bias)
    assert grad_x.dtype == dtype
    assert_sqnr(grad_x, wide[0].grad, floor)
    if bias is not None:
        assert grad_bias is not None and grad_bias.dtype == dtype
        assert_sqnr(grad_bias, wide[1].grad, floor)


@EACH_KIND
def test_without_a_bias(kind: str, device: torch.device) -> None:
    x, _, grad = inputs(kind, 40, 64, device=device)
    wide = x.double().requires_grad_()
    formula(wide, kind, None).backward(grad.double())
    grad_x, grad_bias = activation_backward(grad, x, kind=kind)
    assert grad_bias is None
    assert_sqnr(grad_x, wide.grad, tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB)


@EACH_KIND
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-F{s[1]}")
@pytest.mark.parametrize("scalings", SCALINGS, ids=lambda s: f"{s[0].kind}-{s[1] and s[1].kind}-{s[2]}")
def test_fused_forward_equals_its_parts(scalings, shape, kind, device):
    scaling, column_scaling, is_known = scalings
    quant_scale = torch.tensor(37.5, device=device) if is_known else None
    for name in ("normal", "with_inf_nan"):
        x, bias, _ = inputs(kind, *shape, name, device=device)
        amax = torch.zeros(1, device=device) if is_known else None
        for store in (None, Scaling()):
            found = activation_quantize(
                x, kind=kind, bias=bias, scaling=scaling, column_scaling=column_scaling, quant_scale=quant_scale,
                amax_out=amax, store_scaling=store,
            )  # fmt: skip
            y = activation(x, kind=kind, bias=bias)
            assert_same(found.rows, quantize(y, scaling, quant_scale=quant_scale), "rows")
            expected = column_scaling and quantize_columns(y, column_scaling, quant_scale=quant_scale)
            assert_same(found.columns, expected, "columns")
            assert_same(found.stored, store and quantize(x, store), "the saved input")
        if amax is not None:
            assert amax.item() == y.float().nan_to_num(0.0, math.inf, -math.inf).abs().max().item()


@EACH_KIND
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-F{s[1]}")
@pytest.mark.parametrize(
    ("scaling", "forward"),
    [
        (Scaling(E5M2), None),
        (Scaling(E5M2), (Scaling.block_128x128(), None)),
        (Scaling(), (Scaling(), None)),
        (Scaling.per_row(E5M2), (Scaling.per_row(), None)),
        (Scaling.per_tensor(E5M2), (Scaling.per_tensor(), None)),
        (Scaling(E5M2), (Scaling.per_tensor(), 12.0)),
        (Scaling.per_row(), (Scaling(), None)),
    ],
    ids=lambda s: "-".join(str(getattr(p, "kind", p)) for p in (s if isinstance(s, tuple) else (s,))),
)
def test_fused_backward_equals_its_parts(scaling, forward, shape, kind, device):
    if forward is not None and forward[1] is not None:
        forward = (forward[0], torch.tensor(forward[1], device=device))
    x, bias, grad = inputs(kind, *shape, device=device)
    for stored in (x, quantize(x, Scaling()), quantize(x, Scaling(E5M2, scale_format="e8m0"))):
        found = activation_backward_quantize(
            grad, stored, kind=kind, bias=bias, scaling=scaling, forward_columns=forward
        )
        grad_x, grad_bias = activation_backward(grad, stored, kind=kind, bias=bias)
        rows, columns = quantize_both(grad_x, scaling)
        assert_same(found.rows, rows, "rows")
        assert_same(found.columns, columns, "columns")
        if bias is not None:
            assert_bitwise(found.grad_bias, grad_bias, "bias gradient")
        source = stored if isinstance(stored, Tensor) else stored.dequantize()
        y = activation(source, kind=kind, bias=bias).to(grad.dtype)
        expected = forward and quantize_columns(y, forward[0], quant_scale=forward[1])
        assert_same(found.forward_columns, expected, "the activation's columns")


@EACH_KIND
def test_backward_with_a_known_scale_folds_the_amax(kind: str, device: torch.device) -> None:
    x, bias, grad = inputs(kind, 256, 128, "with_inf_nan", device=device)
    x = x.nan_to_num(1.0, 2.0, -2.0)
    grad[3, 5] = math.nan
    scaling, quant_scale, amax = Scaling.per_tensor(E5M2), torch.tensor(9.0, device=device), torch.zeros(1).to(device)
    found = activation_backward_quantize(
        grad, x, kind=kind, bias=bias, scaling=scaling, quant_scale=quant_scale, amax_out=amax
    )
    grad_x, _ = activation_backward(grad, x, kind=kind, bias=bias)
    rows, columns = quantize_both(grad_x, scaling, quant_scale=quant_scale)
    assert_same(found.rows, rows, "rows")
    assert_same(found.columns, columns, "columns")
    assert amax.item() == grad_x.float().nan_to_num(0.0).abs().max().item()


@EACH_KIND
def test_zero_tokens(kind: str, device: torch.device) -> None:
    x, bias, grad = inputs(kind, 0, 128, device=device)
    assert activation(x, kind=kind, bias=bias).shape == (0, 128)
    found = activation_quantize(
        x, kind=kind, bias=bias, scaling=Scaling(), column_scaling=Scaling.block_128x128(), store_scaling=Scaling()
    )
    assert found.rows.shape == (0, 128)
    assert found.columns is not None and found.columns.shape == (128, 0)
    assert found.stored is not None and found.stored.shape == x.shape
    gradients = activation_backward_quantize(
        grad, found.stored, kind=kind, bias=bias, scaling=Scaling.per_row(), forward_columns=(Scaling(), None)
    )
    assert gradients.rows.shape == x.shape
    if bias is not None:
        assert gradients.grad_bias is not None and gradients.grad_bias.tolist() == [0.0] * 128


@EACH_KIND
@pytest.mark.parametrize("width", [32, 128, 344])
def test_rows_do_not_depend_on_the_batch(kind: str, width: int, device: torch.device) -> None:
    x, bias, _ = inputs(kind, 97, width, device=device)
    whole = activation(x, kind=kind, bias=bias)
    for rows in ([0], [96], [1, 50], list(range(96, -1, -5))):
        assert_bitwise(activation(x[rows], kind=kind, bias=bias), whole[rows])
    layout = torch.cat((x, x), dim=1)[:, : x.shape[1]]
    assert_bitwise(activation(layout, kind=kind, bias=bias), whole)
    assert_bitwise(activation(x.t().contiguous().t(), kind=kind, bias=bias), whole)


@EACH_KIND
def test_extreme_values_stay_finite(kind: str, device: torch.device) -> None:
    values = torch.tensor([-1e30, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 1e30], device=device)[None]
    x = values if kind == "gelu" else torch.cat((values, torch.ones_like(values)), dim=1)
    out = activation(x, kind=kind)
    grad_x, _ = activation_backward(torch.ones_like(values), x, kind=kind)
    assert out.isfinite().all() and grad_x.isfinite().all()
    assert_bitwise(out[0, 5:], values[0, 5:])
    assert (out[0, :5] == 0).all()


def test_opaque_to_the_compiler(device: torch.device) -> None:
    x, _, grad = inputs("swiglu", 32, 128, device=device)

    @torch.compile(backend="eager", fullgraph=True)
    def run(x: Tensor, grad: Tensor, amax: Tensor) -> list[Tensor]:
        known = torch.ones((), device=x.device)
        found = activation_quantize(
            x, kind="swiglu", scaling=Scaling.per_tensor(), quant_scale=known, amax_out=amax, store_scaling=Scaling()
        )
        back = activation_backward_quantize(grad, found.stored, kind="swiglu", scaling=Scaling())
        return [found.rows.qdata, back.columns.qdata]

    amax = torch.zeros(1, device=device)
    codes, columns = run(x, grad, amax)
    assert codes.shape == (32, 128) and columns.shape == (256, 32)
    assert amax.item() > 0


def test_bad_input_is_refused() -> None:
    x, bias, fused = torch.ones(2, 4), torch.ones(2), {"kind": "gelu", "scaling": Scaling()}
    assert_raises(ConfigError, "kind must be one of", activation, x, kind="relu")
    assert_raises(ShapeError, "even last dim", activation, torch.ones(2, 5), kind="swiglu")
    assert_raises(ShapeError, "takes no bias", activation, x, kind="swiglu", bias=bias)
    assert_raises(ShapeError, "bias must have shape", activation, x, kind="gelu", bias=bias)
    assert_raises(ShapeError, r"grad must have shape \(2, 2\)", activation_backward, x, x, kind="swiglu")
    stored = Scaling.per_row()
    assert_raises(RecipeError, "saved in 1x128 blocks", activation_quantize, x, **fused, store_scaling=stored)
    assert_raises(ShapeError, "goes with per_tensor", activation_quantize, x, **fused, quant_scale=torch.ones(()))
