"""Both norms and their gradients against fp64 autograd; edges: no tokens, NaN and inf, strides, wrong operands."""

import pytest
import torch

from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.numerics import QuantizedTensor, Scaling
from octavo.numerics.analysis import sqnr
from octavo.ops.norm import norm_backward, norm_forward
from octavo.ops.norm.layer_norm import layer_norm
from octavo.ops.norm.rms_norm import rms_norm
from octavo.ops.quantize import quantize
from octavo.testing import assert_bitwise, assert_sqnr, tolerances
from tests.assertions import assert_raises

KINDS = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
ZERO_CENTERED = pytest.mark.parametrize("zero_centered_gamma", [False, True], ids=["gamma", "zero_centered"])
# fp32 sums of up to 1000 terms lose 3 to 5 of 24 bits; a bf16 output is rounded to 8.
FLOORS = {torch.float32: 110.0, torch.bfloat16: tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB}
DTYPES = pytest.mark.parametrize("dtype", list(FLOORS), ids=["fp32", "bf16"])
EPS = 1e-5


class Case:
    """One norm's operands, and the fp64 results of autograd on them."""

    def __init__(self, kind, dtype, shape, generator, device, *, residual=False, zero_centered_gamma=False):
        T, K = shape
        draw = lambda *size: torch.randn(size, generator=generator).to(device, dtype)  # noqa: E731
        self.kind, self.zero_centered_gamma = kind, zero_centered_gamma
        self.x, self.weight, self.grad = draw(T, K) * 3 + 1, draw(K), draw(T, K)
        self.bias = draw(K) if kind == "layer_norm" else None
        self.residual, self.grad_residual = (draw(T, K), draw(T, K)) if residual else (None, None)

    def forward(self):
        options = {"kind": self.kind, "zero_centered_gamma": self.zero_centered_gamma, "residual": self.residual}
        return norm_forward(self.x, self.weight, bias=self.bias, eps=EPS, **options)

    def backward(self, stored, mean, rstd):
        options = {"kind": self.kind, "zero_centered_gamma": self.zero_centered_gamma}
        operands = (self.grad, stored, self.weight, mean, rstd)
        return norm_backward(*operands, grad_residual=self.grad_residual, **options)

    def stream(self):
        return self.x if self.residual is None else self.x + self.residual

    def expected(self):
        """(y, grad of x, of weight, of bias) in fp64."""
        leaves = [t.double().requires_grad_() for t in (self.stream(), self.weight)]
        bias = None if self.bias is None else self.bias.double().requires_grad_()
        gamma = leaves[1] + 1 if self.zero_centered_gamma else leaves[1]
        norm = torch.nn.functional.rms_norm if self.kind == "rms_norm" else torch.nn.functional.layer_norm
        extra = (EPS,) if self.kind == "rms_norm" else (bias, EPS)
        y = norm(leaves[0], gamma.shape, gamma, *extra)
        y.backward(self.grad.double())
        grad_x = leaves[0].grad if self.grad_residual is None else leaves[0].grad + self.grad_residual.double()
        return y.detach(), grad_x, leaves[1].grad, None if bias is None else bias.grad


@KINDS
@DTYPES
@ZERO_CENTERED
@pytest.mark.parametrize("shape", [(33, 344), (7, 128), (5, 1000), (1, 1)], ids=lambda s: f"T{s[0]}-K{s[1]}")
def test_values_and_gradients_equal_fp64(kind, dtype, zero_centered_gamma, shape, generator, device):
    case = Case(kind, dtype, shape, generator, device, zero_centered_gamma=zero_centered_gamma)
    y, grad_x, grad_weight, grad_bias = case.expected()
    found = case.forward()
    assert found.y.dtype == dtype and found.summed is None and (found.mean is None) == (kind == "rms_norm")
    assert_sqnr(found.y, y, FLOORS[dtype])
    grads = case.backward(case.x, found.mean, found.rstd)
    if shape != (1, 1):  # a single number's norm is its sign: what is left of its gradient is noise
        assert_sqnr(grads[0], grad_x, FLOORS[dtype])
    if kind == "rms_norm" or shape != (1, 1):
        assert_sqnr(grads[1], grad_weight, FLOORS[dtype])
    assert (grads[2] is None) == (grad_bias is None)
    if grad_bias is not None:
        assert_sqnr(grads[2], grad_bias, FLOORS[dtype])


@KINDS
@DTYPES
def test_a_residual_is_added_first_and_its_gradient_last(kind, dtype, generator, device):
    case = Case(kind, dtype, (19, 344), generator, device, residual=True)
    found = case.forward()
    assert_bitwise(found.summed, case.x + case.residual)
    assert_bitwise(found.y, norm_forward(found.summed, case.weight, bias=case.bias, eps=EPS, kind=kind).y)
    grad_x, grad_weight, _ = case.backward(found.summed, found.mean, found.rstd)
    assert_sqnr(grad_x, case.expected()[1], FLOORS[dtype])
    assert_sqnr(grad_weight, case.expected()[2], FLOORS[dtype])
    case.grad_residual, added = None, case.grad_residual
    alone = case.backward(found.summed, found.mean, found.rstd)[0] + added
    if device.type == "cuda" and dtype == torch.float32:
        assert_sqnr(grad_x, alone, 130.0)  # the compiler contracts the last product and this sum
    else:
        assert_bitwise(grad_x, alone)  # as autograd adds


@KINDS
@pytest.mark.parametrize("scaling", [Scaling(), Scaling.per_row(), Scaling.of_kind("mx_1x32")], ids=lambda s: s.kind)
def test_gradients_from_an_input_saved_in_fp8(kind, scaling, generator, device):
    case = Case(kind, torch.bfloat16, (40, 344), generator, device)
    found = case.forward()
    stored = quantize(case.x, scaling)
    grads = case.backward(stored, found.mean, found.rstd)
    decoded = case.backward(stored.dequantize(), found.mean, found.rstd)
    for ours, wanted in zip(grads, decoded, strict=True):
        if ours is not None:
            assert_sqnr(ours, wanted, tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB)
    # The saved input only scales a correction of grad_x; grad_weight has its whole rounding.
    assert_sqnr(grads[0], case.expected()[1], tolerances.E4M3_NORMAL_DB)
    assert_sqnr(grads[1], case.expected()[2], tolerances.E4M3_NORMAL_DB - 3)


@KINDS
def test_gradients_are_the_same_every_time(kind, device, generator):
    case = Case(kind, torch.bfloat16, (700, 256), generator, device)
    found = case.forward()
    first, second = (case.backward(case.x, found.mean, found.rstd) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@KINDS
def test_no_tokens(kind, device, generator):
    case = Case(kind, torch.bfloat16, (0, 344), generator, device, residual=True)
    found = case.forward()
    assert found.y.shape == found.summed.shape == (0, 344)
    assert found.rstd.shape == (0,)
    grad_x, grad_weight, grad_bias = case.backward(found.summed, found.mean, found.rstd)
    assert grad_x.shape == (0, 344)
    assert grad_weight.eq(0).all() and (grad_bias is None or grad_bias.eq(0).all())


@KINDS
def test_nan_and_inf_stay_in_their_rows(kind, device, generator):
    case = Case(kind, torch.bfloat16, (8, 256), generator, device)
    clean = case.forward()
    case.x[2, 5], case.x[4, 7] = float("nan"), float("inf")
    found = case.forward()
    assert found.y[2].isnan().all()
    assert found.y[4, 7].isnan() and not found.y[4].isinf().any()
    others = [0, 1, 3, 5, 6, 7]
    assert_bitwise(found.y[others], clean.y[others])
    grad_x, grad_weight, _ = case.backward(case.x, found.mean, found.rstd)
    assert grad_x[others].isfinite().all() and grad_x[2].isnan().all()
    assert grad_weight.isnan().any()


@KINDS
def test_strides_do_not_matter(kind, device, generator):
    case = Case(kind, torch.bfloat16, (12, 300), generator, device, residual=True)
    plain = case.forward()
    source = case.x
    for rows, cols in [(slice(None, None, 2), slice(3, 303)), (slice(12), slice(3, 603, 2))]:
        view = torch.zeros(24, 640, dtype=torch.bfloat16, device=device)[rows, cols]
        case.x = view.copy_(source)
        found = case.forward()
        assert_bitwise(found.y, plain.y)
        both = (case.backward(each, found.mean, found.rstd) for each in (view, view.contiguous()))
        for ours, wanted in zip(*both, strict=True):
            assert (ours is None and wanted is None) or sqnr(wanted.cpu(), ours.cpu()) > 100


def test_wrappers_take_any_leading_dims(device, generator):
    x = torch.randn(2, 3, 344, generator=generator).to(device)
    w = torch.randn(344, generator=generator).to(device)
    plain = torch.nn.functional.rms_norm(x, (344,), w, EPS)
    for found, wanted in [
        (rms_norm(x, w, EPS), plain),
        (layer_norm(x, w, w, EPS), torch.nn.functional.layer_norm(x, (344,), w, w, EPS)),
        *((rms_norm(x, w - 1, EPS, zero_centered_gamma=True, exact=exact), plain) for exact in (False, True)),
    ]:
        assert found.shape == x.shape
        assert_sqnr(found, wanted, 110.0)


def test_bad_operands_are_refused():
    x, w = torch.ones(4, 8), torch.ones(8)
    assert_raises(ShapeError, "weight must have shape", norm_forward, x, torch.ones(4), eps=EPS, kind="rms_norm")
    with pytest.raises(ShapeError, match="residual must have x's shape"):
        norm_forward(x, w, eps=EPS, kind="rms_norm", residual=torch.ones(3, 8))
    with pytest.raises(DtypeError, match="residual must have x's dtype"):
        norm_forward(x, w, eps=EPS, kind="rms_norm", residual=x.bfloat16())
    assert_raises(DtypeError, "cast it before", norm_forward, x.double(), w, eps=EPS, kind="rms_norm")
    assert_raises(RecipeError, "rms_norm has no bias", norm_forward, x, w, bias=w, eps=EPS, kind="rms_norm")
    assert_raises(RecipeError, "kind must be one of", norm_forward, x, w, eps=EPS, kind="batch_norm")
    with pytest.raises(RecipeError, match="mean goes with layer_norm"):
        norm_backward(x, x, w, None, torch.ones(4), kind="layer_norm")
    square = Scaling.block_128x128()
    with pytest.raises(RecipeError, match="saved in FP8 with one of"):
        norm_backward(
            x, QuantizedTensor(x.to(square.dtype), torch.ones(1, 1), square), w, None, torch.ones(4), kind="rms_norm"
        )
