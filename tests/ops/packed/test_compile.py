"""The kernels on pieces compile for Hopper without spills and without fma, and move 16 bytes at once."""

import re
from collections.abc import Callable

import pytest
import torch

from octavo.ops.packed import triton as kernels
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched
from tests.ops.packed.cases import buffer

SEED = torch.zeros((), dtype=torch.int32)


X = torch.zeros(2, 8192, dtype=torch.bfloat16)


APART = torch.zeros(2, dtype=torch.int64)


def calls() -> dict[str, Callable[[], object]]:
    (codes, scales), (one_codes, one_scales) = buffer(2, 64), buffer(1, 64)
    return {
        "quantize": lambda: kernels.quantize_pieces(X, codes, scales, None),
        "quantize with residual": lambda: kernels.quantize_pieces(X, codes, scales, X),
        "round": lambda: kernels.round_pieces(X, codes, scales, SEED, 0),
        "requantize": lambda: kernels.requantize_pieces(codes, scales, one_codes, one_scales, True, None),
        "requantize with residual": lambda: kernels.requantize_pieces(
            codes, scales, one_codes, one_scales, True, X[:1]
        ),
        "decode": lambda: kernels.decode_pieces(codes, scales, X),
        "quantize apart": lambda: kernels.quantize_pieces(X, one_codes, one_scales, None, APART, 1),
        "quantize apart with residual": lambda: kernels.quantize_pieces(X, one_codes, one_scales, X, APART, 2),
        "requantize apart": lambda: kernels.requantize_pieces(
            one_codes, one_scales, one_codes, one_scales, True, X[:1], APART, APART
        ),
        "requantize eight apart": lambda: kernels.requantize_pieces(
            one_codes, one_scales, one_codes, one_scales, True, None, APART.repeat(4), APART.repeat(4)
        ),
        "decode apart": lambda: kernels.decode_pieces(one_codes, one_scales, X, APART, 1),
        "sum": lambda: kernels.decode_pieces(codes, scales, X[:1]),
    }


@pytest.mark.parametrize("name", calls())
def test_a_kernel_compiles(name: str) -> None:
    (launch,) = launched(calls()[name])
    report = compiled(launch)
    found = set(re.findall(r"\b(?:fma|mul|add|sub|div)\.[\w.]*f32", report.ptx))
    assert found <= {"mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32"}, found
    assert ".ftz" not in report.ptx
    assert_moves_16_bytes(launch, report.ptx)
