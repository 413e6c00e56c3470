"""octavo's quantizers equal TransformerEngine's own CUDA kernels in every code and scale (tests/golden/README.md)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from octavo.numerics import Scaling
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import quantize, quantize_both, quantize_columns
from octavo.testing import assert_bitwise

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "te_quantizers.json").read_text())["cases"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


TENSOR_KEYS = ("x", "row_codes", "row_scale_inv", "col_codes", "col_scale_inv")


def plain_scale(stored: torch.Tensor, scaling: Scaling, shape: tuple[int, int]) -> torch.Tensor:
    """A scale in TransformerEngine's transposed and padded layout -> [blocks of rows, blocks of columns]."""
    rows, cols = scaling.scale_shape(*shape)
    if scaling.is_per_tensor:
        return stored.reshape(1, 1)
    if scaling.kind == "block_1x128":
        stored = stored.t()
    assert stored.shape[0] >= rows and stored.shape[1] >= cols
    return stored[:rows, :cols]


@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_codes_and_scales_equal_transformer_engine(kind: str, device: torch.device) -> None:
    for case in [case for case in CASES if tuple(case["block"]) == BLOCK_SIZES[kind]]:
        with safe_open(GOLDEN / "te_quantizers.safetensors", "pt") as file:
            stored = {key: file.get_tensor(name) for key, name in case.items() if key in TENSOR_KEYS}
        x = stored["x"].view(DTYPES[case["dtype"]]).reshape(case["shape"]).to(device)
        scaling = Scaling.of_kind(kind, FORMATS[case["format"]], scale_format="e8m0" if case["pow2"] else "fp32")
        rows, columns = quantize_both(x, scaling)
        found = {"row": (quantize(x, scaling), rows)}
        if "col_codes" in stored:
            found["col"] = (quantize_columns(x, scaling), columns)
        for direction, both in found.items():
            for q in both:
                shape = (q.shape[0], q.shape[1])
                codes = stored[f"{direction}_codes"].view(torch.uint8).reshape(shape)
                assert_bitwise(q.qdata.view(torch.uint8), codes, f"codes of {case}")
                scale = plain_scale(stored[f"{direction}_scale_inv"], q.scaling, shape)
                assert_bitwise(q.scale, scale, f"scale of {case}")


def test_all_committed_cases_are_there() -> None:
    assert len(CASES) == 200
    assert {tuple(case["shape"]) for case in CASES} == {(128, 256), (48, 384)}
    assert {tuple(case["block"]) for case in CASES} <= set(BLOCK_SIZES.values())
