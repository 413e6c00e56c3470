"""The routing kernels have the reference's bits: experts, weights, places, the batch sorted by expert and back."""

import pytest
import torch

from octavo.numerics import Scaling, quantize_reference
from octavo.ops.moe import Routing, combine_rows, dispatch_codes, dispatch_rows
from octavo.ops.moe import triton as kernels
from octavo.ops.moe.reference import (
    combine_reference,
    dispatch_codes_reference,
    dispatch_reference,
    moe_routing_reference,
)
from octavo.testing import assert_bitwise
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
# tokens, experts, slots, alignment
SIZES = [(1, 8, 2, 16), (37, 8, 3, 1), (70, 128, 8, 16), (5, 4, 4, 128), (23, 60, 6, 16), (9, 1, 1, 16)]
SIZES += [(600, 16, 2, 16)]
# about the bounds of place_few_rows: tokens of a pass, all tokens, slots
FEW, PASS, SLOTS = kernels.FEW_TOKENS, kernels.TOKENS_A_PASS, kernels.FEW_SLOTS
FEW_SIZES = [(1, 5, 1, 16), (1, 128, 8, 1), (3, 512, 8, 128), (PASS - 1, 5, 1, 1), (PASS, 1, 1, 128), (PASS, 128, 8, 1)]
FEW_SIZES += [(PASS + 1, 20, 8, 16), (FEW, 16, 1, 1), (FEW + 1, 16, 8, 1), (FEW + 1, 5, 1, 16)]
FEW_SIZES += [(7, 40, SLOTS, 16), (7, 40, SLOTS + 1, 1)]
if not is_interpreting():
    SIZES += [(t, 128, 8, 16) for t in (16, 64, 256, 512, 513, 4096, 16384)]
    SIZES += [(512, 512, 8, 128), (3000, 256, 8, 128), (777, 512, 10, 16)]


def some_logits(tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return (3 * torch.randn(tokens, experts, generator=generator)).to(DEVICE, dtype)


def without_signs(x: torch.Tensor) -> torch.Tensor:
    """x with one NaN for all, whose sign a division leaves to the device."""
    return x.masked_fill(x.isnan(), torch.nan) if x.is_floating_point() else x


def check(logits: torch.Tensor, top_k: int, normalize: bool, alignment: int) -> Routing:
    found = kernels.moe_routing(logits, top_k, normalize, alignment)
    for got, expected in zip(found, moe_routing_reference(logits, top_k, normalize, alignment), strict=True):
        assert_bitwise(without_signs(got), without_signs(expected))
    return Routing(*found)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "alignment"), SIZES)
def test_routing(tokens: int, experts: int, top_k: int, alignment: int, normalize: bool) -> None:
    check(some_logits(tokens, experts), top_k, normalize, alignment)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "alignment"), FEW_SIZES)
def test_few_tokens(tokens: int, experts: int, top_k: int, alignment: int) -> None:
    check(some_logits(tokens, experts, torch.bfloat16), top_k, True, alignment)


@pytest.mark.parametrize("alignment", [1, 16])
def test_few_tokens_of_one_choice(alignment: int) -> None:
    """An expert has a row of every token or none; NaN chooses as equal logits do."""
    logits = torch.zeros(PASS + 3, 12, device=DEVICE)
    logits[1::2, 7] = torch.nan
    assert check(logits, 4, True, alignment).experts.unique().tolist() == [0, 1, 2, 3]
    logits[:, 9:] = 3.0
    assert check(logits[::2], 3, True, alignment).experts.unique().tolist() == [9, 10, 11]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    """bf16 logits of many experts have ties."""
    logits = some_logits(50, 128, dtype)
    check(logits, 8, True, 16)
    check(logits[:, 3:77], 5, True, 16)
    check(logits.t(), 5, True, 16)


def test_programs_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several counts and tiles a program and several chunks of counts, at a size that the interpreter bears."""
    monkeypatch.setattr(kernels, "FEW_TOKENS", 0)
    check(some_logits(77, 16), 5, True, 1)
    monkeypatch.setattr(kernels, "PLACE_PROGRAMS", 3)
    monkeypatch.setattr(kernels, "MOST_SLOTS_A_TILE", 32)
    monkeypatch.setattr(kernels, "COUNTS_A_CHUNK", 64)
    check(some_logits(301, 16), 3, True, 16)
    check(torch.zeros(301, 16, device=DEVICE), 3, True, 1)  # all to the same experts


def test_equal_and_extreme_logits() -> None:
    logits = some_logits(9, 12)
    logits[0] = 1.0
    logits[1, 4:] = 7.0
    logits[2, 5] = float("nan")
    logits[3, 5] = float("inf")
    logits[4, 5:] = -float("inf")
    logits[5] = -float("inf")
    logits[6, 3] = 500.0  # all others underflow, and are chosen by their number
    logits[7] *= 30
    routing = check(logits, 4, True, 16)
    assert routing.experts[:3].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert routing.experts[6].tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize("num_experts", [8, 60])
def test_a_token_does_not_see_its_neighbours(num_experts: int) -> None:
    logits = some_logits(90, num_experts)
    whole = kernels.moe_routing(logits, 6, True, 16)
    for rows in ([0], [89], [3, 80], list(range(89, -1, -3))):
        part = kernels.moe_routing(logits[rows], 6, True, 1)
        for got, expected in zip(part[:3], whole[:3], strict=True):
            assert_bitwise(got, expected[rows])


@pytest.mark.parametrize("width", [40, 1100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dispatch_and_combine(dtype: torch.dtype, width: int) -> None:
    routing = check(some_logits(21, 8), 3, False, 16)
    wide = torch.randn(21, 2 * width, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    for x in (wide[:, :width], wide[:, :width].contiguous(), wide[:, 1::2]):
        rows = kernels.dispatch_rows(x, routing.slots, 3)
        assert_bitwise(rows, dispatch_reference(x, routing.slots, 3))
    rows = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    for weights in (routing.weights, None):
        found = kernels.combine_rows(rows, routing.rows, weights)
        assert_bitwise(found, combine_reference(rows, routing.rows, weights))


@pytest.mark.parametrize("width", [256, 336, 50])
@pytest.mark.parametrize("kind", ["per_row", "block_1x128", "mx_1x32"])
def test_dispatched_codes(kind: str, width: int) -> None:
    routing = check(some_logits(21, 8), 3, False, 16)
    x = torch.randn(21, width, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    q = quantize_reference(x, Scaling.of_kind(kind))
    codes, scale = kernels.dispatch_codes(q.qdata, q.scale, routing.slots, 3)
    expected = dispatch_codes_reference(q.qdata, q.scale, routing.slots, 3)
    assert_bitwise(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert_bitwise(scale, expected[1])
    assert scale.stride() == expected[1].stride()


@pytest.mark.gpu
def test_the_ops_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("dispatch_rows", "dispatch_codes", "combine_rows"):
        kept = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, name=name, kept=kept: (called.append(name), kept(*a))[1])
    routing = check(some_logits(21, 8), 3, False, 16)
    x = torch.randn(21, 128, device="cuda", dtype=torch.bfloat16)
    combine_rows(dispatch_rows(x, routing), routing)
    dispatch_codes(quantize_reference(x, Scaling.per_row()), routing)
    assert called == ["dispatch_rows", "combine_rows", "dispatch_codes"]
    called.clear()
    monkeypatch.setenv("OCTAVO_FORCE_REFERENCE", "1")
    combine_rows(dispatch_rows(x, routing), routing)
    assert not called


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 16384])
def test_between_devices(tokens: int) -> None:
    """fp64 exponentials, rounded, are the same on both but for one in some 10**8."""
    logits = some_logits(tokens, 128)
    found, expected = kernels.moe_routing(logits, 8, True, 16), moe_routing_reference(logits.cpu(), 8, True, 16)
    assert all((found[i].cpu() != expected[i]).sum() <= 8 for i in range(3))
    if torch.equal(found[1].cpu(), expected[1]):
        for got, wanted in zip(found[3:], expected[3:], strict=True):
            assert_bitwise(got.cpu(), wanted)
