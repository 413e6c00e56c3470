"""The GEMM with GeLU and quantization in its epilogue against the separate ops: in the interpreter and on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.ops.activation.gelu import gelu_reference
from octavo.ops.gemm.mm_gelu import triton as kernels
from octavo.ops.gemm.scaled_mm import scaled_mm_reference
from octavo.testing import assert_bitwise, assert_sqnr, generate
from octavo.testing.interpreter import correct_interpreter, is_interpreting

pytestmark = [] if is_interpreting() else pytest.mark.gpu
DEVICE = "cpu" if is_interpreting() else "cuda"
SHAPES = [(5, 136, 64), (70, 130, 208)] + ([] if is_interpreting() else [(1000, 16384, 4096), (33, 16384, 4096)])
SCALING = Scaling.per_tensor()

if is_interpreting():
    correct_interpreter()


def make(M: int, N: int, K: int, seed: int = 0) -> tuple[QuantizedTensor, QuantizedTensor, torch.Tensor]:
    a, b = (
        quantize_reference(size * generate("normal", shape, torch.bfloat16, seed=seed + s, device=DEVICE), SCALING)
        for s, (shape, size) in enumerate((((M, K), 1.0), ((N, K), K**-0.5)))
    )
    return a, b, generate("normal", (N,), torch.bfloat16, seed=seed + 2, device=DEVICE)


def separate(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, quant_scale: torch.Tensor, dtype: torch.dtype
) -> QuantizedTensor:
    hidden = scaled_mm_reference(a, b, None, dtype)
    return quantize_reference(gelu_reference(hidden, bias), SCALING, quant_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_it_is_the_separate_ops(M: int, N: int, K: int, has_bias: bool, dtype: torch.dtype) -> None:
    a, b, bias = make(M, N, K)
    quant_scale = torch.tensor([300.0], device=DEVICE)  # clips what is above 1.5
    operands = (a, b, bias if has_bias else None)
    assert kernels.can_run(a, b, SCALING)
    found = kernels.mm_gelu(*operands, SCALING, quant_scale, dtype)
    expected = separate(*operands, quant_scale, dtype)
    assert_bitwise(found.scale, expected.scale)
    assert (expected.qdata.float().abs() == 448).any()
    # A sum that differs moves codes to their neighbour. A GPU's matrix units keep fewer bits of it (3.5e-3 of the
    # output on an H200): near zero, where codes are as fine, that is many, which weigh little.
    floor, most = (44.0, 0.02) if is_interpreting() else (32.0, 0.3)
    assert_sqnr(found.dequantize(), expected.dequantize(), floor)
    assert (found.qdata.view(torch.uint8) != expected.qdata.view(torch.uint8)).float().mean() < most


def test_a_row_depends_on_itself_alone() -> None:
    a, b, bias = make(150, 136, 256)
    quant_scale = torch.tensor([100.0], device=DEVICE)
    whole = kernels.mm_gelu(a, b, bias, SCALING, quant_scale, torch.bfloat16).qdata
    for count in (1, 17, 64, 65, 129):
        some = QuantizedTensor(a.qdata[:count], a.scale, SCALING)
        found = kernels.mm_gelu(some, b, bias, SCALING, quant_scale, torch.bfloat16)
        assert_bitwise(found.qdata, whole[:count], f"{count} rows")


def test_not_finite() -> None:
    a, b, bias = make(3, 128, 64)
    bias[5], bias[6] = torch.nan, torch.inf
    codes = kernels.mm_gelu(a, b, bias, SCALING, torch.ones(1, device=DEVICE), torch.bfloat16).qdata
    assert (codes[:, 5].view(torch.uint8) == 0x7F).all()
    assert (codes[:, 6].float() == 448).all()


def test_other_scalings_are_left_to_the_separate_ops() -> None:
    a, b, _ = make(3, 128, 64)
    rows = quantize_reference(a.dequantize(), Scaling.per_row())
    assert not kernels.can_run(rows, b, SCALING)
    assert not kernels.can_run(a, b, Scaling.per_tensor(torch.float8_e5m2))
