"""The fused kernels equal the plain kernel and then the quantizer in every bit: in the interpreter and on a GPU."""

import pytest
import torch
from torch import Tensor

from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.ops.activation import triton as kernels
from octavo.ops.activation.gelu import triton as gelu
from octavo.ops.activation.gelu.reference import gelu_backward_reference, gelu_reference
from octavo.ops.activation.swiglu import triton as swiglu
from octavo.ops.activation.swiglu.reference import swiglu_backward_reference, swiglu_reference
from octavo.testing import assert_bitwise, assert_sqnr, generate, tolerances
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_codes

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
ROW, BLOCK, SQUARE, TENSOR = Scaling.per_row(), Scaling(), Scaling.block_128x128(), Scaling.per_tensor()
EACH_KIND = pytest.mark.parametrize("kind", ["swiglu", "gelu"])
# Two tiles each way, aligned and with ragged tokens; what the GPU sees besides.
SMALL = [(144, 256), (80, 128), (67, 128)]
SHAPES = SMALL if is_interpreting() else [*SMALL, (1, 128), (63, 1408), (4096, 7168), (257, 14336)]


def inputs(kind: str, shape: tuple[int, int], name: str = "normal", dtype: torch.dtype = torch.bfloat16):
    tokens, width = shape
    x = generate(name, (tokens, 2 * width if kind == "swiglu" else width), dtype, device=DEVICE)
    bias = generate("normal", (width,), dtype, seed=1, device=DEVICE) if kind == "gelu" else None
    return x, bias, generate("heavy_tailed", (tokens, width), dtype, seed=2, device=DEVICE)


def plain(x: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    return swiglu.swiglu(x) if kind == "swiglu" else gelu.gelu(x, bias)


def plain_backward(grad: Tensor, x: Tensor, kind: str, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (swiglu.swiglu_backward(grad, x), None) if kind == "swiglu" else gelu.gelu_backward(grad, x, None, bias)


def check_codes(found: QuantizedTensor | None, source: Tensor, scaling: Scaling, known: Tensor | None, what: str):
    assert found is not None, what
    expected = quantize_reference(source.cpu(), scaling, None if known is None else known.cpu())
    assert_codes(found, expected, what)


FORWARD = [(BLOCK, None), (BLOCK, SQUARE), (BLOCK, BLOCK), (ROW, ROW), (TENSOR, None), (TENSOR, TENSOR)]


@EACH_KIND
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-F{s[1]}")
@pytest.mark.parametrize("known", [None, 37.5], ids=["fresh", "known"])
def test_forward(known: float | None, shape: tuple[int, int], kind: str) -> None:
    x, bias, _ = inputs(kind, shape)
    y = plain(x, kind, bias)
    for rows, columns in [(TENSOR, None), (TENSOR, TENSOR)] if known else FORWARD:
        if columns is not None and not kernels.fits_register_tile(rows, columns, x):
            continue
        quant_scale = None if known is None else torch.tensor(known, device=DEVICE)
        amax = None if known is None else torch.zeros(1, device=DEVICE)
        for store in (None, BLOCK):
            found = kernels.activation_quantize(x, kind, bias, rows, columns, quant_scale, amax, store)
            what = f"{rows.kind}, {columns and columns.kind}"
            check_codes(found[0], y, rows, quant_scale, f"rows of {what}")
            if columns is not None:
                check_codes(found[1], y.t(), columns, quant_scale, f"columns of {what}")
            if store is not None:
                check_codes(found[2], x, store, None, f"the saved input beside {what}")
        assert amax is None or amax.item() == y.float().abs().max().item()


@EACH_KIND
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-F{s[1]}")
def test_backward_reads_the_saved_codes(shape: tuple[int, int], kind: str) -> None:
    """The gradients from FP8 codes are those from the same numbers in fp32."""
    x, bias, grad = inputs(kind, shape)
    q = quantize_reference(x, BLOCK)
    if kind == "swiglu":
        found, found_bias = swiglu.swiglu_backward(grad, q.qdata, q.scale), None
    else:
        found, found_bias = gelu.gelu_backward(grad, q.qdata, q.scale, bias)
    wanted, wanted_bias = plain_backward(grad, q.dequantize(), kind, bias)
    assert_bitwise(found, wanted)
    if bias is not None:
        assert_bitwise(found_bias, wanted_bias)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-F{s[1]}")
@pytest.mark.parametrize("scaling", [BLOCK, ROW, TENSOR, Scaling.per_tensor(torch.float8_e5m2)], ids=str)
@pytest.mark.parametrize("known", [None, 3e-2], ids=["fresh", "known"])
def test_backward_in_both_directions(known: float | None, scaling: Scaling, shape: tuple[int, int]) -> None:
    if known is not None and not scaling.is_per_tensor:
        pytest.skip("only a tensor's scale can be known")
    x, _, grad = inputs("swiglu", shape)
    saved = quantize_reference(x, BLOCK)
    if not kernels.can_fuse_backward(grad, saved, scaling):
        assert shape[0] % 16
        return
    quant_scale = None if known is None else torch.tensor(known, device=DEVICE)
    amax = None if known is None else torch.zeros(1, device=DEVICE)
    wanted = swiglu.swiglu_backward(grad, saved.qdata, saved.scale)
    rows, columns = kernels.swiglu_backward_quantize(grad, saved, scaling, quant_scale, amax)
    check_codes(rows, wanted, scaling, quant_scale, "rows")
    check_codes(columns, wanted.t(), scaling, quant_scale, "columns")
    assert amax is None or amax.item() == wanted.float().abs().max().item()


@EACH_KIND
@pytest.mark.parametrize("width", [256, 384] if is_interpreting() else [256, 384, 4096, 14336, 16384 + 128])
def test_whole_rows(width: int, kind: str) -> None:
    """One scale a row, rows alone: a program holds a row, ragged or not; the widest are read twice."""
    x, bias, _ = inputs(kind, (3, width))
    for store in (None, BLOCK):
        found = kernels.activation_quantize(x, kind, bias, ROW, None, None, None, store)
        check_codes(found[0], plain(x, kind, bias), ROW, None, "rows")
        if store is not None:
            check_codes(found[2], x, store, None, "the saved input")


def test_rows_too_wide_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_WHOLE_ROW", 128)
    x, _, _ = inputs("swiglu", (70, 256))
    found = kernels.activation_quantize(x, "swiglu", None, ROW, None, None, None, BLOCK)
    check_codes(found[0], plain(x, "swiglu", None), ROW, None, "rows")
    check_codes(found[2], x, BLOCK, None, "the saved input")


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, in the interpreter
@EACH_KIND
@pytest.mark.parametrize("name", ["with_inf_nan", "zeros", "format_max", "near_tiny"])
def test_inputs(name: str, kind: str) -> None:
    x, bias, _ = inputs(kind, (16, 128), name)
    found = kernels.activation_quantize(x, kind, bias, BLOCK, BLOCK, None, None, BLOCK)
    y = plain(x, kind, bias)
    check_codes(found[0], y, BLOCK, None, "rows")
    check_codes(found[2], x, BLOCK, None, "the saved input")
    check_codes(found[1], y.t(), BLOCK, None, "columns")


@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [(63, 344), (130, 64), (5, 2)], ids=lambda s: f"T{s[0]}-F{s[1]}")
def test_plain_kernels_against_the_reference(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    x, bias, _ = inputs(kind, shape, dtype=dtype)
    grad = generate("normal", shape, dtype, seed=2, device=DEVICE)
    floor = 110.0 if dtype == torch.float32 else tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB
    grad_x, grad_bias = plain_backward(grad, x, kind, bias)
    if kind == "swiglu":
        expected, expected_grad = swiglu_reference(x), swiglu_backward_reference(grad, x)
    else:
        expected, expected_grad = gelu_reference(x, bias), gelu_backward_reference(grad, x, bias)
        assert grad_bias is not None
        assert_sqnr(grad_bias, expected_grad.double().sum(0), floor, "bias gradient")
    assert_sqnr(plain(x, kind, bias), expected, floor, "values")
    assert_sqnr(grad_x, expected_grad, floor, "gradient")


def test_strides() -> None:
    wide = generate("normal", (96, 400), torch.bfloat16, device=DEVICE)
    for x in (wide[:, 3:259], wide.t()[:256].t(), wide[::2, :256]):
        columns = BLOCK if kernels.fits_register_tile(BLOCK, BLOCK, x) else None
        found = kernels.activation_quantize(x, "swiglu", None, BLOCK, columns, None, None, BLOCK)
        y = plain(x, "swiglu", None)
        assert_bitwise(y, plain(x.contiguous(), "swiglu", None))
        check_codes(found[0], y, BLOCK, None, "rows")
        check_codes(found[2], x, BLOCK, None, "the saved input")
        if columns is not None:
            check_codes(found[1], y.t(), BLOCK, None, "columns")
    assert columns is not None, "the last is aligned"


@pytest.mark.skipif(is_interpreting(), reason="needs more than 2**31 elements")
def test_offsets_past_32_bits() -> None:
    x = torch.ones(1, 2048, device=DEVICE, dtype=torch.bfloat16).expand(1_500_000, 2048)
    rows, columns, stored = kernels.activation_quantize(x, "swiglu", None, BLOCK, SQUARE, None, None, BLOCK)
    assert columns is not None and stored is not None
    for codes in (rows.qdata[-1], columns.qdata[-1, -4096:], stored.qdata[-1]):
        assert (codes.float() == 448).all()
