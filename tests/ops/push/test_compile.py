"""Pushes compile for Hopper, and move 16 bytes at once."""

import pytest
import torch

from octavo.ops.push import triton as kernels
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched

ADDRESSES = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize("words", [32, 2048])
@pytest.mark.parametrize("share", [None, 512])
def test_push_compiles(words: int, share: int | None) -> None:
    x = torch.zeros(1024, words, dtype=torch.int32)
    (launch,) = launched(lambda: kernels.push(x, ADDRESSES, 0, stride_out=2 * words, first_word=words, share=share))
    assert_moves_16_bytes(launch, compiled(launch).ptx)


def test_the_sum_compiles() -> None:
    parts = torch.zeros(2, 512, 2048, dtype=torch.bfloat16)
    (launch,) = launched(lambda: kernels.add(parts))
    assert_moves_16_bytes(launch, compiled(launch).ptx)
