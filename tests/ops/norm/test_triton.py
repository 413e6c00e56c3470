"""The norm kernels against the reference, and their bits, which no tile may change: in the interpreter and on a GPU."""

import pytest
import torch

from octavo.numerics import Scaling, quantize_reference
from octavo.ops.norm import reference
from octavo.ops.norm import triton as kernels
from octavo.testing import assert_bitwise, assert_sqnr, generate, tolerances
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_all_bitwise

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
KINDS = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
# fp32 sums of up to 8192 terms in another order; a bf16 output moves a few elements by one unit in the last place.
FLOORS = {torch.float32: 105.0, torch.bfloat16: tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB}
# Rows that share a program and rows of their own; aligned and not.
SMALL = [(5, 344), (37, 128), (3, 131), (1, 1)]
LARGE = [(1, 4096), (300, 4096), (63, 431), (1000, 128), (17, 5120), (9, 8192), (2000, 7168)]
SHAPES = SMALL if is_interpreting() else SMALL + LARGE


def operands(kind: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16):
    """x, weight, bias, residual."""
    x, residual = (generate("normal", shape, dtype, seed=s, device=DEVICE) for s in (0, 1))
    weight, bias = (generate("normal", shape[1:], dtype, seed=s, device=DEVICE) for s in (2, 3))
    return x, weight, bias if kind == "layer_norm" else None, residual


def backward_operands(kind: str, shape: tuple[int, int], dtype: torch.dtype, scaling: Scaling | None):
    """The arguments of norm_backward, and the fp32 values of what is stored."""
    x, weight, _, grad_residual = operands(kind, shape, dtype)
    mean, rstd = reference.statistics(x, 1e-5, kind)
    grad = generate("normal", shape, dtype, seed=4, device=DEVICE)
    vectors = (weight, mean if kind == "layer_norm" else None, rstd, grad_residual, False)
    if scaling is None:
        return (grad, x, None, *vectors, []), x
    stored = quantize_reference(x, scaling)
    return (grad, stored.qdata, stored.scale, *vectors, list(scaling.block_size)), stored.dequantize()


def check_backward(kind: str, shape: tuple[int, int], dtype: torch.dtype, scaling: Scaling | None) -> None:
    arguments, stored = backward_operands(kind, shape, dtype, scaling)
    check(kernels.norm_backward(*arguments), reference.backward(arguments[0], stored, *arguments[3:-1]), dtype)


def check(found, wanted, dtype: torch.dtype) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        if ours.numel() > 1 or theirs.numel() != 1:
            assert_sqnr(ours, theirs, FLOORS[dtype])


@KINDS
@pytest.mark.parametrize("dtype", list(FLOORS), ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-K{s[1]}")
def test_forward_and_backward(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    x, weight, bias, residual = operands(kind, shape, dtype)
    for added in (None, residual):
        found = kernels.norm_forward(x, weight, bias, added, 1e-5, kind, False)
        check(found, reference.forward(x, weight, bias, added, 1e-5, kind, False), dtype)
    check_backward(kind, shape, dtype, None)


@KINDS
@pytest.mark.parametrize("scaling", [Scaling(), Scaling.per_row(), Scaling.of_kind("mx_1x32")], ids=lambda s: s.kind)
def test_backward_from_fp8(scaling: Scaling, kind: str) -> None:
    for shape in SHAPES[:3]:
        check_backward(kind, shape, torch.bfloat16, scaling)


@KINDS
def test_rows_too_long_for_one_program(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LONGEST_ROW", 128)
    monkeypatch.setattr(kernels, "BACKWARD_LONGEST_ROW", 128)
    monkeypatch.setattr(kernels, "CHUNK", 128)
    monkeypatch.setattr(kernels, "COLUMN_TILE", (4, 128, 4))
    for dtype, shape in [(torch.bfloat16, (3, 300)), (torch.float32, (5, 260))]:
        x, weight, bias, residual = operands(kind, shape, dtype)
        found = kernels.norm_forward(x, weight, bias, residual, 1e-5, kind, True)
        check(found, reference.forward(x, weight, bias, residual, 1e-5, kind, True), dtype)
        for scaling in (None, Scaling()):
            check_backward(kind, shape, dtype, scaling)


@KINDS
def test_no_tile_changes_a_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, residual = operands(kind, (13, 344))

    def run(x: torch.Tensor):
        return kernels.norm_forward(x, weight, bias, residual, 1e-5, kind, False)

    wanted = run(x)
    for row_tile, elements in [(512, 512), (16384, 1024), (2048, 256)]:
        monkeypatch.setattr(kernels, "ROW_TILE", row_tile)
        monkeypatch.setattr(kernels, "ELEMENTS_PER_WARP", elements)
        assert_all_bitwise(run(x), wanted)
    unaligned = torch.zeros(13, 345, dtype=x.dtype, device=DEVICE)[:, 1:]
    assert_all_bitwise(run(unaligned.copy_(x)), wanted)


def test_a_row_does_not_depend_on_the_batch() -> None:
    x, weight, _, _ = operands("rms_norm", (33, 344))
    whole = kernels.norm_forward(x, weight, None, None, 1e-5, "rms_norm", False)[0]
    for rows in ([0], [32], [1, 20], list(range(32, -1, -3))):
        found = kernels.norm_forward(x[rows], weight, None, None, 1e-5, "rms_norm", False)[0]
        assert_bitwise(found, whole[rows])


@pytest.mark.skipif(is_interpreting(), reason="needs more than 2**31 elements")
def test_offsets_past_32_bits() -> None:
    x = torch.ones(1, 4096, device=DEVICE, dtype=torch.bfloat16).expand(600_000, 4096)
    weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    y, _, _, rstd = kernels.norm_forward(x, weight, None, None, 0.0, "rms_norm", False)
    assert (y[-1] == 1).all() and (rstd == 1).all()
    _, grad_weight, _ = kernels.norm_backward(y, x, None, weight, None, rstd, None, False, [])
    assert (grad_weight == 600_064).all()  # 600,000 in bf16
