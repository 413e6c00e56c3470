"""The public fake quantizers: octavo.numerics.emulated's rule, laid out as the input, through the dispatcher too."""

import pytest
import torch

from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.numerics import emulated, hadamard
from octavo.ops.quantize.fake_quantize import fake_quantize_mxfp8, fake_quantize_nvfp4, random_hadamard
from octavo.testing import assert_bitwise, generate
from tests.assertions import assert_raises

E5M2 = torch.float8_e5m2


def test_it_is_the_rule(device: torch.device) -> None:
    x = generate("with_inf_nan", (40, 96), torch.bfloat16)
    y = generate("heavy_tailed", (40, 96), torch.bfloat16)
    for source in (x, y, x.t(), y.t()):
        on_device = source.to(device)
        assert_bitwise(fake_quantize_mxfp8(on_device), emulated.fake_quantize_mxfp8(source))
        assert_bitwise(fake_quantize_mxfp8(on_device, E5M2), emulated.fake_quantize_mxfp8(source, E5M2))
        down = fake_quantize_mxfp8(on_device, scale_rounding="down")
        assert_bitwise(down, emulated.fake_quantize_mxfp8(source, scale_rounding="down"))
        assert_bitwise(random_hadamard(on_device), hadamard.random_hadamard(source))
        for options in ({}, {"square_blocks": True}, {"stochastic_seed": 3}):
            found = fake_quantize_nvfp4(on_device, **options)
            assert_bitwise(found, emulated.fake_quantize_nvfp4(source, **options))


def test_a_result_lies_as_its_input_does(device: torch.device) -> None:
    x = generate("normal", (40, 96), torch.bfloat16).to(device)
    for fake_quantize in (fake_quantize_mxfp8, fake_quantize_nvfp4):
        assert fake_quantize(x).is_contiguous()
        columns = fake_quantize(x.t())
        assert columns.shape == (96, 40) and columns.t().is_contiguous()
        assert fake_quantize(x[:, :50]).is_contiguous()


def test_leading_dims_and_empty_tensors(device: torch.device) -> None:
    x = generate("normal", (4, 5, 40), device=str(device))
    for fake_quantize in (fake_quantize_mxfp8, fake_quantize_nvfp4):
        assert_bitwise(fake_quantize(x), fake_quantize(x.view(20, 40)).view(4, 5, 40))
        assert fake_quantize(x[:0]).shape == (0, 5, 40)
        assert fake_quantize(x[..., :0]).shape == (4, 5, 0)
    assert_bitwise(fake_quantize_mxfp8(x[0, 0]), fake_quantize_mxfp8(x)[0, 0])


def test_every_nan_becomes_the_quiet_one(device: torch.device) -> None:
    """Casts of NaN give other bits on each device, and on a CPU in a tensor's last elements."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.full((3, 33), torch.nan, dtype=dtype)
        x[1] = -x[1]
        for fake_quantize in (fake_quantize_mxfp8, fake_quantize_nvfp4):
            assert_bitwise(fake_quantize(x.to(device)), torch.full_like(x, torch.nan))


def test_compilers_see_ops() -> None:
    x = generate("normal", (20, 40), torch.bfloat16)
    tests = ("test_schema", "test_faketensor")
    for source in (x, x.t(), x[:, :30]):
        torch.library.opcheck(torch.ops.octavo.fake_quantize_mxfp8.default, (source, E5M2, "up"), test_utils=tests)
        torch.library.opcheck(torch.ops.octavo.random_hadamard.default, (source,), test_utils=tests)
        torch.library.opcheck(torch.ops.octavo.fake_quantize_nvfp4.default, (source, True, None), test_utils=tests)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(RecipeError, match="scale_rounding must be 'up'"):
        fake_quantize_mxfp8(torch.ones(2, 2), scale_rounding="nearest")  # type: ignore[arg-type]
    assert_raises(ShapeError, "must be a matrix", random_hadamard, torch.ones(2, 2, 2))
    assert_raises(DtypeError, "float64", fake_quantize_mxfp8, torch.ones(2, 2, dtype=torch.float64))
    assert_raises(DtypeError, "e4m3fn or float8_e5m2", fake_quantize_mxfp8, torch.ones(2, 2), torch.float16)
    assert_raises(ShapeError, "needs a matrix", fake_quantize_nvfp4, torch.ones(2, 2, 2), square_blocks=True)
    assert_raises(ShapeError, "scalar", fake_quantize_nvfp4, torch.ones(()))
