"""Exact products of few tokens: the library's bits in less time, or the library."""

from typing import Any

import pytest
import torch

from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.ops._runtime.kernel_requests import leaving_out_launches
from octavo.ops.gemm.scaled_mm import exact as library_exact
from octavo.ops.gemm.scaled_mm import library, scaled_mm, scaled_mm_reference
from octavo.ops.gemm.skinny_mm import exact, skinny_mm
from octavo.ops.gemm.skinny_mm.triton import tiled
from octavo.testing import assert_bitwise

SCALINGS = {
    "row": (Scaling.per_row(), Scaling.per_row()),
    "block": (Scaling.block_1x128(), Scaling.block_128x128()),
}


class WholeSums:
    """Stands for the tiles on a CPU: the reference's products, at some numbers of rows other bits, and each size."""

    def __init__(self, off_at: tuple[int, ...] = ()) -> None:
        self.off_at, self.sizes = off_at, list[int]()

    def __call__(self, a: QuantizedTensor, b: QuantizedTensor, bias: Any, out_dtype: torch.dtype) -> torch.Tensor:
        self.sizes.append(a.shape[0])
        made = scaled_mm_reference(a, b, bias, torch.float32)
        return (made * (1 + 2**-7) if a.shape[0] in self.off_at else made).to(out_dtype)


@pytest.mark.parametrize("off_at", [(), (250,)])
def test_exact_tiles_have_the_librarys_bits_or_are_not_used(
    off_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = WholeSums(off_at)
    monkeypatch.setattr(exact, "_has_bits", {})
    monkeypatch.setattr(exact, "whole_sums_mm", stand_in)
    monkeypatch.setattr(library, "scaled_mm_cuda", scaled_mm_reference)
    monkeypatch.setattr(library_exact, "CHECKED_ROWS", (64, 512))
    a, b = (quantize_reference(torch.randn(M, 128), s) for M, s in zip((5, 48), SCALINGS["row"], strict=True))
    for _ in range(2):  # compared once
        assert exact.can_run(a, b, None, torch.bfloat16) == (not off_at)
    assert stand_in.sizes == list(exact.CHECKED_ROWS)


def test_steps_without_their_kernels_say_nothing_about_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They ask for the tiles, and compare zeros."""
    stand_in = WholeSums(off_at=exact.CHECKED_ROWS)
    monkeypatch.setattr(exact, "_has_bits", {})
    monkeypatch.setattr(exact, "whole_sums_mm", stand_in)
    monkeypatch.setattr(library, "scaled_mm_cuda", scaled_mm_reference)
    monkeypatch.setattr(library_exact, "CHECKED_ROWS", (64, 512))
    a, b = (quantize_reference(torch.randn(M, 128), s) for M, s in zip((5, 48), SCALINGS["row"], strict=True))
    with leaving_out_launches():
        assert exact.can_run(a, b, None, torch.bfloat16) and stand_in.sizes
    assert not caplog.records
    assert not exact.can_run(a, b, None, torch.bfloat16), "compared again, in earnest"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize(("N", "K"), [(3072, 4096), (2048, 12288), (4096, 4096), (12288, 4096)])
def test_exact_products_of_few_tokens_have_the_bits_of_many(N: int, K: int, kind: str) -> None:
    scalings = SCALINGS[kind]
    a, b = (
        quantize_reference(torch.randn(rows, K, device="cuda").bfloat16(), scaling)
        for rows, scaling in zip((600, N), scalings, strict=True)
    )
    whole = scaled_mm(a, b, exact=True)
    for M in (1, 40, 64, 200, 256):
        part = QuantizedTensor(a.qdata[:M], a.scale[:M].t().contiguous().t(), a.scaling)
        assert_bitwise(skinny_mm(part, b, exact=True), whole[:M])
        assert not tiled.suits(M, N) or exact.can_run(part, b, None, torch.bfloat16)
