"""The kernels on pieces compile for Hopper without spills and without fma, and move 16 bytes at once."""

import re
from collections.abc import Callable

import pytest
import torch

from octavo.distributed.packed import Packed
from octavo.ops.packed import triton as kernels
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched

SEED = torch.zeros((), dtype=torch.int32)


def packed() -> Packed:
    return Packed.empty(2, 8192, torch.device("cpu"))


CALLS: dict[str, Callable[[Packed], object]] = {
    "decode": lambda p: kernels.decode_pieces(p.codes, p.scales, torch.bfloat16),
    "sum": lambda p: kernels.sum_pieces(p.codes, p.scales),
    "round": lambda p: kernels.round_pieces(torch.zeros(2, 8192, dtype=torch.bfloat16), p.codes, p.scales, SEED, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_compiles(name: str) -> None:
    (launch,) = launched(lambda: CALLS[name](packed()))
    report = compiled(launch)
    found = set(re.findall(r"\b(?:fma|mul|add|sub|div)\.[\w.]*f32", report.ptx))
    assert found <= {"mul.f32", "add.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32"}, found
    assert ".ftz" not in report.ptx
    assert_moves_16_bytes(launch, report.ptx)
