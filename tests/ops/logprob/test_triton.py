"""The Triton row kernels follow the reference: in the interpreter, on small shapes, and on a GPU."""

import pytest
import torch

from octavo.ops.logprob import reference
from octavo.ops.logprob import triton as kernels
from octavo.ops.logprob.chunks import empty_chunk
from octavo.testing import assert_bitwise
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_all_bitwise

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = torch.device("cpu" if is_interpreting() else "cuda")
INF, NAN = float("inf"), float("nan")
# One block, several with a ragged last one, and one element; a pitch of 16 and none.
SMALL = [(1, 1), (3, 23), (3, 4096), (2, 9001)]
LARGE = [(63, 431), (300, 50257), (128, 128256)]
SHAPES = SMALL if is_interpreting() else SMALL + LARGE
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-V{s[1]}")
PITCH = pytest.mark.parametrize("has_pitch", [True, False], ids=["pitch", "tight"])


def place(values: torch.Tensor, has_pitch: bool) -> torch.Tensor:
    rows, cols = values.shape
    out = empty_chunk(rows, cols, values.dtype, DEVICE) if has_pitch else values.new_empty(rows, cols, device=DEVICE)
    return out.copy_(values)


def make(shape: tuple[int, int], has_pitch: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * 5).to(dtype)
    targets = torch.randint(0, shape[1], (shape[0],), generator=generator)
    return place(logits, has_pitch), targets.to(DEVICE)


def close(found: torch.Tensor, wanted: torch.Tensor, ulps: float = 0.0) -> None:
    """NaN where NaN is wanted; else within rounding, and an ulp of 16 bits where results have 16 bits."""
    rtol = max(4e-6, ulps * torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=rtol, atol=4e-6, equal_nan=True)


@SHAPE
@PITCH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_statistics(shape: tuple[int, int], has_pitch: bool, dtype: torch.dtype) -> None:
    logits, targets = make(shape, has_pitch, dtype)
    found = kernels.logit_rows(logits, targets, 1 / 0.7, True)
    wanted = reference.logit_rows_reference(logits, targets, 1 / 0.7, True)
    for a, b in zip(found, wanted, strict=True):
        close(a, b)
    assert_all_bitwise(kernels.logit_rows(logits, targets, 1 / 0.7, False)[:2], found[:2])


@SHAPE
@PITCH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_gradients(shape: tuple[int, int], has_pitch: bool, dtype: torch.dtype) -> None:
    logits, targets = make(shape, has_pitch, torch.float32)
    lse = logits.logsumexp(-1)
    weights = torch.linspace(-1, 1, shape[0], device=DEVICE)
    found, wanted = (place(torch.full(shape, NAN, dtype=dtype), has_pitch) for _ in range(2))
    for first_col in (0, 7):
        args = (logits, lse, targets, weights, weights + 1, 1.0, first_col)
        kernels.logit_grads(found, *args)
        reference.logit_grads_reference(wanted, *args)
        close(found, wanted, 1.0)


@SHAPE
@PITCH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cross_entropy(shape: tuple[int, int], has_pitch: bool, dtype: torch.dtype) -> None:
    logits, targets = make(shape, has_pitch, torch.float32)
    targets[1::2] = -100
    found, wanted = (place(torch.full(shape, NAN, dtype=dtype), has_pitch) for _ in range(2))
    losses = kernels.cross_entropy_rows(found, logits, targets, -100, 1e-3)
    close(losses, reference.cross_entropy_rows_reference(wanted, logits, targets, -100, 1e-3))
    close(found, wanted, 1.0)
    alone = kernels.cross_entropy_rows(None, logits, targets, -100, 1e-3)
    if is_interpreting():
        assert_bitwise(alone, losses)
    else:  # two compilations: the compiler may contract another product into an fma
        close(alone, losses)


def special_rows() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.zeros(7, 24)
    logits[0, 3], logits[1, 3], logits[3, 3:] = NAN, INF, -INF
    logits[2] = -INF
    logits[4], logits[5, 3], logits[6] = -1e30, 3e38, NAN
    return place(logits, True), torch.tensor([3, 3, 0, 1, 0, 3, -100], device=DEVICE)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's maximum of four NaN
def test_inf_and_nan() -> None:
    logits, targets = special_rows()
    found, wanted = torch.empty_like(logits), torch.empty_like(logits)
    losses = kernels.cross_entropy_rows(found, logits, targets, -100, 0.0)
    close(losses, reference.cross_entropy_rows_reference(wanted, logits, targets, -100, 0.0))
    assert found.isnan().any(-1).tolist() == [True, True, True, False, False, False, False]
    close(found[3:], wanted[3:])
    statistics = kernels.logit_rows(logits, targets.clamp_min(0), 1.0, True)
    for a, b in zip(statistics, reference.logit_rows_reference(logits, targets.clamp_min(0), 1.0, True), strict=True):
        close(a, b)


def test_a_target_outside_the_vocabulary_is_nan() -> None:
    logits = place(torch.zeros(3, 24), True)
    targets = torch.tensor([24, -1, 0], device=DEVICE)
    assert kernels.logit_rows(logits, targets, 1.0, False)[1].isnan().tolist() == [True, True, False]
    assert kernels.cross_entropy_rows(None, logits, targets, -100, 0.0).isnan().tolist() == [True, True, False]


def test_strides_and_no_rows() -> None:
    wide = torch.randn(24, 40, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    for logits in (wide[3:9, 2:19], wide.t()[2:19, 3:9], wide[::5], wide[:0]):
        targets = torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
        found = kernels.logit_rows(logits, targets, 1.0, True)
        for a, b in zip(found, reference.logit_rows_reference(logits, targets, 1.0, True), strict=True):
            close(a, b)


@pytest.mark.skipif(is_interpreting(), reason="needs more than 2**31 elements")
def test_offsets_past_32_bits() -> None:
    logits = torch.zeros(20_000, 128_256, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.arange(20_000, device=DEVICE)
    logits[-1, targets[-1]] = 3.0
    lse, logprobs, _ = kernels.logit_rows(logits, targets, 1.0, False)
    close(lse[-1] - 3.0, -logprobs[-1])
    kernels.logit_grads(logits, logits, lse, targets, torch.ones_like(lse), torch.ones_like(lse), 1.0, 0)
    assert logits[-1, targets[-1]] < 0


@SHAPE
@PITCH
@pytest.mark.parametrize("is_per_row", [False, True], ids=["one", "per-row"])
def test_the_exact_normalizer(shape: tuple[int, int], has_pitch: bool, is_per_row: bool) -> None:
    """On a GPU torch's own bits; numpy, which interprets, has another exp."""
    logits, _ = make(shape, has_pitch, torch.float32)
    temperatures = torch.linspace(0.5, 1.5, shape[0], device=DEVICE)[:, None] if is_per_row else torch.tensor([[0.7]])
    temperatures = temperatures.to(DEVICE)
    found = kernels.exact_normalizer(logits, temperatures, reference.SUM_BITS)
    wanted = reference.normalizer(logits / temperatures)
    assert_bitwise(found[0], wanted[0])
    if is_interpreting():
        close(found[1], wanted[1])
    else:
        assert_bitwise(found[1], wanted[1])
    for row in (0, shape[0] - 1):
        alone = kernels.exact_normalizer(logits[row : row + 1], temperatures[row * is_per_row][None], 30)
        assert_bitwise(torch.cat(alone), torch.cat([x[row : row + 1] for x in found]))


def test_the_exact_normalizer_drops_nothing() -> None:
    logits = place(torch.randn(6, 5000), True)
    logits[0, 4999], logits[1, 7], logits[3] = NAN, INF, -INF
    logits[2, 9], logits[4, 1:], logits[5] = -INF, -INF, 0.0
    maximum, log_sum = kernels.exact_normalizer(logits, torch.ones(1, 1, device=DEVICE), reference.SUM_BITS)
    wanted = reference.normalizer(logits)
    assert log_sum.isnan()[:, 0].tolist() == [True, True, False, True, False, False]
    assert_bitwise(maximum[[2, 4, 5]], wanted[0][[2, 4, 5]])
    assert log_sum[4] == 0.0
    close(log_sum, wanted[1])
