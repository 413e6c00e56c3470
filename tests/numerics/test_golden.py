"""octavo's quantizers equal TransformerEngine's own CUDA kernels in every code and scale (tests/golden/README.md)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.quantize import quantize, quantize_both, quantize_columns
from octavo.testing import assert_bitwise

GOLDEN = Path(__file__).parent.parent / "golden"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


TENSOR_KEYS = ("x", "row_codes", "row_scale_inv", "col_codes", "col_scale_inv")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def cases() -> list[Any]:
    found = []
    for case in json.loads((GOLDEN / "te_quantizers.json").read_text())["cases"]:
        numbers = "-".join(str(n) for n in (*case["shape"], *case["block"]))
        name = f"{case['input']}-{case['dtype']}-{case['format']}-{'e8m0' if case['pow2'] else 'fp32'}-{numbers}"
        found.append(pytest.param(case, id=name))
    return found


def plain_scale(stored: torch.Tensor, scaling: Scaling, shape: tuple[int, int]) -> torch.Tensor:
    """A scale in TransformerEngine's transposed and padded layout -> [blocks of rows, blocks of columns]."""
    rows, cols = scaling.scale_shape(*shape)
    if scaling.is_per_tensor:
        return stored.reshape(1, 1)
    if scaling.kind == "block_1x128":
        stored = stored.t()
    assert stored.shape[0] >= rows and stored.shape[1] >= cols
    return stored[:rows, :cols]


def check(q: QuantizedTensor, codes: torch.Tensor, scale_inv: torch.Tensor) -> None:
    shape = (q.shape[0], q.shape[1])
    assert_bitwise(q.qdata.view(torch.uint8), codes.view(torch.uint8).reshape(shape), "codes")
    assert_bitwise(q.scale, plain_scale(scale_inv, q.scaling, shape), "scale")


@DEVICES
@pytest.mark.parametrize("case", cases())
def test_codes_and_scales_equal_transformer_engine(case: dict[str, Any], device: str) -> None:
    with safe_open(GOLDEN / "te_quantizers.safetensors", "pt") as file:
        stored = {key: file.get_tensor(name) for key, name in case.items() if key in TENSOR_KEYS}
    x = stored["x"].view(DTYPES[case["dtype"]]).reshape(case["shape"]).to(device)
    scale_format = "e8m0" if case["pow2"] else "fp32"
    scaling = Scaling(FORMATS[case["format"]], tuple(case["block"]), scale_format)
    rows, columns = quantize_both(x, scaling)
    for q in (quantize(x, scaling), rows):
        check(q, stored["row_codes"], stored["row_scale_inv"])
    if "col_codes" in stored:
        for q in (quantize_columns(x, scaling), columns):
            check(q, stored["col_codes"], stored["col_scale_inv"])


def test_all_committed_cases_are_there() -> None:
    index = json.loads((GOLDEN / "te_quantizers.json").read_text())
    assert len(index["cases"]) == 200
    assert {tuple(c["shape"]) for c in index["cases"]} == {(128, 256), (48, 384)}
