"""Every kernel that makes codes of an operand sets the flag of an infinite amax, and of nothing else."""

from collections.abc import Callable

import pytest
import torch

from octavo.numerics import Scaling, quantize_reference
from octavo.numerics.infinity import infinity_flag, take_infinity
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.activation import triton as activation
from octavo.ops.norm.norm_quantize import triton as norm_quantize
from octavo.ops.quantize import triton as kernels
from octavo.ops.quantize.fake_quantize import triton as fake_quantize
from octavo.testing.interpreter import is_interpreting

DEVICE = torch.device("cpu" if is_interpreting() else "cuda:0")
SHAPES = [(144, 160), (131, 133)]  # aligned, and not; more than a tile each way
SCALINGS = [*BLOCK_SIZES, "known"]


def known(name: str) -> tuple[torch.Tensor, ...]:
    """The scale and the place of the amax, for delayed scaling."""
    return (torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)) if name == "known" else ()


def scaling_of(name: str) -> Scaling:
    return Scaling.per_tensor() if name == "known" else Scaling.of_kind(name)


def check(run: Callable[[torch.Tensor], object], x: torch.Tensor, place: tuple[int, int] = (-1, -1)) -> None:
    """Finite numbers, zeros, an amax of 448 and NaN leave the flag; one infinity, in the last block, sets it."""
    take_infinity(DEVICE)
    address = infinity_flag(DEVICE).data_ptr()
    run(x)
    x[0, 0], x[1, 1], x[2:4] = 448.0, torch.nan, 0.0
    run(x)
    assert take_infinity(DEVICE).item() == 0.0
    for infinity in (torch.inf, -torch.inf):
        x[place] = infinity
        run(x)
        assert take_infinity(DEVICE).item() == 1.0
        assert take_infinity(DEVICE).item() == 0.0  # it is cleared
    assert infinity_flag(DEVICE).data_ptr() == address  # CUDA graphs keep the address


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCALINGS)
def test_quantizers(name: str, shape: tuple[int, int]) -> None:
    scaling = scaling_of(name)
    for run in (
        lambda x: kernels.quantize_matrix(x, scaling, None, *known(name)),
        lambda x: kernels.quantize_matrix(x, None, scaling, *known(name)),
        lambda x: kernels.quantize_matrix(x, scaling, scaling, *known(name)),
    ):
        check(run, torch.randn(shape, device=DEVICE).bfloat16())


def test_quantizers_of_fp32_and_of_two_scalings() -> None:
    x = torch.randn(144, 160, device=DEVICE)
    check(lambda x: kernels.quantize_matrix(x, Scaling(), Scaling.block_128x128()), x.bfloat16())
    check(lambda x: kernels.quantize_matrix(x, Scaling.per_row(), Scaling()), x.clone())
    check(lambda x: kernels.quantize_matrix(x, Scaling(scale_format="e8m0", amax_floor=1e-4), None), x.half())


def test_the_codes_and_scales_are_those_of_the_contract() -> None:
    x = torch.randn(131, 160, device=DEVICE).bfloat16()
    x[5, 7] = torch.inf
    found, expected = kernels.quantize_matrix(x, Scaling(), None)[0], quantize_reference(x, Scaling())
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
    assert found.scale[5, 0].item() == 1.0


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("name", ["block_1x128", "per_row", "per_tensor", "known"])
def test_norm_and_quantize(name: str, columns: bool) -> None:
    """A norm makes NaN of a row with an infinity, so its weight has it."""
    x, scaling = torch.randn(67, 256, device=DEVICE).bfloat16(), scaling_of(name)

    def run(weight: torch.Tensor) -> None:
        scale, amax = known(name) or (None, None)
        other = scaling if columns else None
        norm_quantize.norm_quantize(
            x, weight[0], None, None, scale, amax, 1e-6, "rms_norm", False, scaling, other, None
        )

    check(run, torch.ones(4, 256, device=DEVICE).bfloat16(), place=(0, -1))


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("name", ["block_1x128", "per_row", "per_tensor", "known"])
def test_activation_and_quantize(name: str, columns: bool) -> None:
    scaling = scaling_of(name)

    def run(x: torch.Tensor) -> None:
        scale, amax = known(name) or (None, None)
        activation.activation_quantize(x, "swiglu", None, scaling, scaling if columns else None, scale, amax, None)

    check(run, torch.rand(80, 256, device=DEVICE).bfloat16() + 1.0)  # swiglu(gate, inf) is infinite, swiglu(0, inf) NaN


@pytest.mark.parametrize("name", ["block_1x128", "per_row", "per_tensor", "known"])
def test_activation_backward_and_quantize(name: str) -> None:
    saved, _ = kernels.quantize_matrix(torch.ones(80, 256, device=DEVICE).bfloat16(), Scaling(), None)
    scaling = scaling_of(name)

    def run(grad: torch.Tensor) -> None:
        activation.swiglu_backward_quantize(grad, saved, scaling, *(known(name) or (None, None)))

    check(run, torch.randn(80, 128, device=DEVICE).bfloat16())


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_emulated_formats(turned: bool) -> None:
    for run in (
        lambda x: fake_quantize.mxfp8(x.t() if turned else x, torch.float8_e4m3fn),
        lambda x: fake_quantize.nvfp4(x.t() if turned else x, False, 0),
    ):
        check(run, torch.randn(144, 160, device=DEVICE).bfloat16())
