"""mm_gelu is the GEMM, GeLU and the quantizer one after the other; the MLP takes it where it is switched on."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.nn import GeluMLP, norm_mlp
from octavo.numerics import QuantizedTensor, Scaling, get_recipe
from octavo.ops.activation import activation_quantize
from octavo.ops.gemm.mm_gelu import mm_gelu
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize
from octavo.testing import assert_bitwise, assert_sqnr

STATIC = get_recipe("tensorwise", static_input=True)
SCALING = Scaling.per_tensor()
CODES_DB = 32.0  # a GPU's sums keep fewer bits in the kernel, which moves codes to their neighbour


def make(generator: torch.Generator, device: torch.device) -> tuple[QuantizedTensor, QuantizedTensor, torch.Tensor]:
    a, b = (torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in ((70, 128), (256, 128)))
    return quantize(a, SCALING), quantize(b / 12, SCALING), torch.randn(256, generator=generator).to(device).bfloat16()


@pytest.mark.parametrize("scaling", [SCALING, Scaling.per_tensor(torch.float8_e5m2)], ids=["e4m3", "e5m2"])
def test_it_is_the_separate_ops(scaling: Scaling, device: torch.device, generator: torch.Generator) -> None:
    a, b, bias = make(generator, device)
    quant_scale = torch.tensor([90.0], device=device)
    found = mm_gelu(a, b, bias=bias, scaling=scaling, quant_scale=quant_scale)
    hidden = scaled_mm(a, b)
    expected = activation_quantize(hidden, kind="gelu", bias=bias, scaling=scaling, quant_scale=quant_scale).rows
    assert found.scaling == scaling
    assert_bitwise(found.scale, expected.scale)
    if device.type == "cpu":
        assert_bitwise(found.qdata, expected.qdata)
    assert_sqnr(found.dequantize(), expected.dequantize(), CODES_DB)


def test_bad_operands(device: torch.device, generator: torch.Generator) -> None:
    a, b, bias = make(generator, device)
    one = torch.ones(1, device=device)
    with pytest.raises(ShapeError, match="bias must have shape"):
        mm_gelu(a, b, bias=bias[:5], scaling=SCALING, quant_scale=one)
    with pytest.raises(ShapeError, match="known quant_scale"):
        mm_gelu(a, b, bias=bias, scaling=Scaling.per_row(), quant_scale=one)
    with pytest.raises(ShapeError, match="agree in K"):
        mm_gelu(a, QuantizedTensor(b.qdata[:, :64], b.scale, SCALING), bias=bias, scaling=SCALING, quant_scale=one)


@pytest.mark.parametrize("recipe", [STATIC, get_recipe("tensorwise")], ids=["static", "dynamic"])
def test_the_mlp_takes_it_for_static_inputs(
    recipe, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mlp = GeluMLP(128, 256).to(device)
    for linear in (mlp.fc_in, mlp.fc_out):
        linear.set_recipe(recipe)
        linear.set_input_scale(torch.tensor(0.01))
    calls = []
    monkeypatch.setattr(norm_mlp, "mm_gelu", lambda *args, **kwargs: calls.append(1) or mm_gelu(*args, **kwargs))
    x = torch.randn(40, 128, generator=generator).to(device, torch.bfloat16)
    with torch.no_grad():
        assert not norm_mlp.GELU_IN_GEMM
        expected = mlp(x)
        assert not calls
        monkeypatch.setattr(norm_mlp, "GELU_IN_GEMM", True)
        found = mlp(x)
        assert len(calls) == int(recipe.static_input)
        assert_sqnr(found, expected, CODES_DB)
        if device.type == "cpu":
            assert_bitwise(found, expected)
        calls.clear()
        mlp.fc_in.exact = mlp.fc_out.exact = True
        assert mlp(x).isfinite().all()
        assert not calls  # the trainer has no such step
