"""What a compiler sees of scaled_mm: torch's own op where the operands go to the library as they are, else octavo's."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import get_recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.scaled_mm import library, scaled_mm

PLAIN = torch.ops.aten._scaled_mm.default
OWN = torch.ops.octavo.scaled_mm.default
delayed, blockwise = get_recipe("delayed"), get_recipe("blockwise")


def operand(rows: int, scaling: Scaling | None, device: str = "cuda") -> QuantizedTensor:
    assert scaling is not None, "recipes of FP8"
    codes = torch.empty(rows, 64, dtype=scaling.dtype, device=device)
    scale = torch.empty(scaling.scale_shape(rows, 64), dtype=torch.float32, device=device)
    return QuantizedTensor(codes, scale, scaling)


def products(rows: int, scalings: tuple[Any, Any], device: str = "cuda", **options: Any) -> list[Any]:
    """The products in a trace of one call."""

    def call(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        left, right = QuantizedTensor(a, a_scale, scalings[0]), QuantizedTensor(b, b_scale, scalings[1])
        return scaled_mm(left, right, **options)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        a, b = operand(rows, scalings[0], device), operand(48, scalings[1], device)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        graph = make_fx(call)(a.qdata, a.scale, b.qdata, b.scale).graph
    return [node.target for node in graph.nodes if node.target in (PLAIN, OWN)]


def test_operands_that_go_as_they_are() -> None:
    both = (delayed.input, delayed.weight)
    assert products(32, both) == products(32, both, fast_accum=True) == [PLAIN]
    assert products(32, (delayed.grad_output, delayed.weight)) == [PLAIN]  # E5M2 times E4M3


@pytest.mark.parametrize(
    ("rows", "scalings", "device", "options"),
    [
        (33, (delayed.input, delayed.weight), "cuda", {}),
        (32, (delayed.input, delayed.weight), "cuda", {"exact": True}),
        (32, (delayed.input, delayed.weight), "cuda", {"out_dtype": torch.float32}),
        (32, (delayed.grad_output, delayed.grad_output), "cuda", {}),
        (32, (blockwise.input, blockwise.weight), "cuda", {}),
        (32, (delayed.input, delayed.weight), "cpu", {}),
    ],
    ids=["rows to add", "exact", "fp32", "E5M2 twice", "blocks", "CPU"],
)
def test_others(rows: int, scalings: tuple[Any, Any], device: str, options: dict[str, Any]) -> None:
    assert products(rows, scalings, device, **options) == [OWN]


def test_a_traced_product_has_the_arguments_of_another() -> None:
    """By torch's CPU kernel, which takes the same."""
    given = [torch.randn(32, 64), torch.randn(48, 64)]
    a, b = (QuantizedTensor(x.to(torch.float8_e4m3fn), torch.full((1, 1), 0.5), s) for x, s in
            zip(given, (delayed.input, delayed.weight), strict=True))  # fmt: skip
    bias = torch.randn(48, dtype=torch.bfloat16)
    out = library.plain_mm(a, b, bias, torch.bfloat16, False, False)
    expected = library.decoded_mm(a, b, bias, torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-4)
