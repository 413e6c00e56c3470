"""Matrices quantized together are what each is alone, and what cannot be quantized together is refused."""

import pytest
import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics import Scaling
from octavo.numerics.infinity import take_infinity
from octavo.ops.quantize import quantize
from octavo.ops.quantize.many import MatrixBatch
from octavo.testing import assert_bitwise, generate

SHAPES = [(144, 256), (63, 431), (1, 1), (128, 128)]
PER_TENSOR, SQUARE = Scaling.per_tensor(), Scaling.block_128x128()


def make_matrices(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    matrices = [generate("heavy_tailed", shape, dtype).to(device) for shape in SHAPES]
    matrices[0][3, 4], matrices[1][:, 2], matrices[3][5, 6] = torch.nan, -0.0, torch.finfo(dtype).smallest_normal / 8
    return matrices


def check_codes(batch: MatrixBatch, quant_scales: torch.Tensor | None, amaxes: list[torch.Tensor] | None) -> None:
    """Against `quantize`, one matrix after the other."""
    codes, scales = batch.quantize(quant_scales, amaxes)
    for i, x in enumerate(batch.matrices):
        known = {} if quant_scales is None else {"quant_scale": quant_scales[i]}
        if amaxes is not None:
            known["amax_out"] = torch.full_like(amaxes[i], 0.5)
        expected = quantize(x.to(torch.bfloat16), batch.scaling, **known)
        assert_bitwise(codes[i], expected.qdata.view(torch.uint8).view(-1), f"codes {i}")
        assert_bitwise(scales[i], expected.scale.view(-1), f"scales {i}")
        if amaxes is not None:
            assert_bitwise(amaxes[i], known["amax_out"], f"amax {i}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_codes_and_amaxes(dtype: torch.dtype, device: torch.device) -> None:
    matrices = make_matrices(dtype, device)
    check_codes(MatrixBatch(matrices, SQUARE), None, None)
    batch, quant_scales = MatrixBatch(matrices, PER_TENSOR), torch.tensor([0.5, 1.0, 448.0, 3.0], device=device)
    check_codes(batch, quant_scales, None)
    check_codes(batch, quant_scales, [torch.full((1,), 0.5, device=device) for _ in matrices])
    found = torch.tensor([0.0, 0.0, 1e9, 0.0], device=device)
    batch.fold_amaxes(found)
    expected = [x.to(torch.bfloat16).float().nan_to_num(0.0, torch.inf, -torch.inf).abs().max() for x in matrices]
    assert_bitwise(found, torch.stack([*expected[:2], found.new_tensor(1e9), expected[3]]), "amaxes")


def test_values_and_places_are_those_of_the_call(device: torch.device) -> None:
    matrices = make_matrices(torch.bfloat16, device)
    batch = MatrixBatch(matrices, PER_TENSOR)
    for factor in (1.0, 2.0):
        for x in matrices:
            x.mul_(factor)
        check_codes(
            batch, torch.full((4,), factor, device=device), [torch.full((1,), 0.5, device=device) for _ in matrices]
        )


def test_an_infinity_is_noted(device: torch.device) -> None:
    x = torch.ones(128, 128, device=device)
    x[0, 0] = torch.inf
    for scaling, given in ((SQUARE, ()), (PER_TENSOR, (torch.ones(1, device=device), [torch.zeros(1, device=device)]))):
        take_infinity(device)
        MatrixBatch([x], scaling).quantize(*given)
        assert take_infinity(device).item() == 1.0


def test_what_cannot_be_quantized_together_is_refused() -> None:
    x = torch.zeros(4, 4)
    for wrong in (torch.zeros(4), torch.zeros(0, 4), torch.zeros(4, 8)[:, :4]):
        with pytest.raises(ShapeError, match="matrices must be contiguous and have elements"):
            MatrixBatch([x, wrong], SQUARE)
    with pytest.raises(ShapeError, match="together in square blocks or per tensor, got"):
        MatrixBatch([x], Scaling())
    for others in ([x, x.bfloat16()], [x.double()]):
        with pytest.raises(DtypeError, match="matrices must be of one dtype"):
            MatrixBatch(others, SQUARE)
    for scaling, given in ((SQUARE, torch.ones(1)), (PER_TENSOR, None), (PER_TENSOR, torch.ones(2))):
        with pytest.raises(ShapeError, match="of 1 matrices takes"):
            MatrixBatch([x], scaling).quantize(given)
    with pytest.raises(ShapeError, match=r"amaxes must be 1 fp32 numbers, got torch.Size\(\[2\]\)"):
        MatrixBatch([x], PER_TENSOR).fold_amaxes(torch.zeros(2))
