"""The fused norms compile for Hopper without spills, and round to bf16 by pairs."""

import re

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.norm.norm_quantize import triton as kernels
from tests.ops.compiled import Launch, compiled, launched

KINDS = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
ROW, BLOCK, SQUARE, TENSOR = Scaling.per_row(), Scaling(), Scaling.block_128x128(), Scaling.per_tensor()
# rows, columns, whether quant_scale is known
PAIRS = {
    "block_rows": (BLOCK, None, False),
    "block_square": (BLOCK, SQUARE, False),
    "block_block": (BLOCK, BLOCK, False),
    "row_row": (ROW, ROW, False),
    "known": (TENSOR, TENSOR, True),
    "tensor": (TENSOR, TENSOR, False),
}


def launches(kind: str, K: int, pair: str, *, store: bool) -> list[Launch]:
    x, weight = torch.empty(512, K, dtype=torch.bfloat16), torch.empty(K, dtype=torch.bfloat16)
    scaling, column_scaling, is_known = PAIRS[pair]
    known, bias = torch.ones(1) if is_known else None, weight if kind == "layer_norm" else None
    operands = (x, weight, bias, x if store else None, known, known)
    scalings = (scaling, column_scaling, BLOCK if store else None)
    return launched(lambda: kernels.norm_quantize(*operands, 1e-5, kind, False, *scalings, store))


def check(launch: Launch) -> None:
    report = compiled(launch)
    # the start of the scales' division is between 1 and 2
    assert ".ftz" not in report.ptx.replace("rsqrt.approx.ftz.f32", ""), f"{launch} flushes subnormals"
    assert len(re.findall(r"cvt\.rn\.bf16\.f32", report.ptx)) < 16, f"{launch} rounds one by one"


@pytest.mark.parametrize("pair", [pytest.param("block_rows", marks=pytest.mark.slow), "row_row", "block_square"])
def test_two_launches(pair: str) -> None:
    """The quick part of test_every_pair."""
    found = launches("rms_norm", 4096, pair, store=False)
    assert len(found) == (1 if PAIRS[pair][1] is None else 2)
    for launch in found:
        check(launch)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    "store", [pytest.param(False, marks=pytest.mark.largest), True], ids=["alone", "residual_store_and_norm"]
)
@pytest.mark.parametrize("pair", list(PAIRS))
def test_every_pair(pair: str, store: bool, kind: str) -> None:
    for launch in launches(kind, 4096, pair, store=store):
        check(launch)


def test_the_norm_beside_its_codes() -> None:
    """What a router reads and what experts multiply, of the sum, in one launch."""
    x, weight = torch.empty(256, 2048, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.bfloat16)
    for scaling in (BLOCK, ROW):
        rest = (None, None, 1e-6, "rms_norm", False, scaling, None, None, True)
        (launch,) = launched(lambda rest=rest: kernels.norm_quantize(x, weight, None, x, *rest))
        check(launch)


def test_rows_of_experts_are_added_up_on_the_way() -> None:
    """16 bytes of each of a token's rows at once; a product is rounded before it is added."""
    x, weight = torch.empty(256, 2048, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.bfloat16)
    rows, of_token, weights = x.repeat(8, 1), torch.empty(256, 8, dtype=torch.int64), torch.empty(256, 8)
    rest, texts = (None, None, 1e-6, "rms_norm", False, BLOCK, None, None, False), list[str]()
    for residual, routed in ((x, ()), (rows, (of_token, weights))):
        (launch,) = launched(lambda r=residual, of=routed: kernels.norm_quantize(x, weight, None, r, *rest, *of))
        check(launch)
        texts.append(compiled(launch).ptx)
    assert len(re.findall(r"ld\.global[\w.:]*v4\.b32", texts[1])) >= 9
    assert texts[1].count("fma.rn.f32") <= texts[0].count("fma.rn.f32")
