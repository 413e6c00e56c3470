"""The sampling kernel draws the reference's tokens."""

import pytest
import torch
import triton
import triton.language as tl

from octavo.ops.sampling import triton as kernels
from octavo.ops.sampling.reference import sample_reference, uniform_noise
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
VOCABS = [1, 77, 300] + ([] if is_interpreting() else [32_000, 151_936])
# temperature, top_k, top_p, min_p
PARAMS = [
    (0.0, -1, 1.0, 0.0),
    (1.0, -1, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, -1, 0.8, 0.0),
    (1.0, -1, 1.0, 0.1),
    (0.9, 20, 0.95, 0.02),
    (1.0, 1, 0.5, 0.5),
    (1e-3, -1, 0.1, 0.0),
    (2.0, 10_000, 0.999, 0.0),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_interpreting():
        monkeypatch.setattr(kernels, "BLOCK", 128)


def columns(params: list[tuple[float, int, float, float]], seed: int) -> list[torch.Tensor]:
    temperature, top_k, top_p, min_p = zip(*params, strict=True)
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (len(params),), generator=generator)
    positions = torch.randint(0, 10_000, (len(params),), generator=generator)
    return [*map(torch.tensor, (temperature, top_k, top_p, min_p)), seeds, positions]


def check(logits: torch.Tensor, given: list[torch.Tensor]) -> None:
    wanted = sample_reference(logits, *given)
    found = kernels.sample(logits.to(DEVICE), *(t.to(DEVICE) for t in given))
    assert found.cpu().tolist() == wanted.tolist()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("seed", [0, 1] if is_interpreting() else range(10))
def test_the_reference_s_tokens(seed: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    check(3.0 * torch.randn(len(PARAMS), vocab, generator=generator), columns(PARAMS, seed))


@pytest.mark.parametrize("vocab", [200])
def test_equal_logits(vocab: int) -> None:
    """Ties at the thresholds go to the lower index."""
    generator = torch.Generator().manual_seed(0)
    few_values = torch.randint(-2, 3, (len(PARAMS), vocab), generator=generator).float()
    few_values[:, ::7] *= -0.0
    check(few_values, columns(PARAMS, 3))
    check(torch.zeros(len(PARAMS), vocab), columns(PARAMS, 4))


@pytest.mark.parametrize("seed", range(4))
def test_scores_that_fp32_cannot_tell_apart(seed: int) -> None:
    """In one block and over blocks: the noise is taken off, so that all scores are equal but for the fp64 rest."""
    given = columns([(1.0, -1, 1.0, 0.0)] * 3, seed)
    noise = -torch.log(-torch.log(uniform_noise(given[4], given[5], 200)))
    check((5.0 - noise).float(), given)
    masked = (5.0 - noise).float()
    masked[:, :120] = -torch.inf
    check(masked, given)


@pytest.mark.parametrize("kept", [(5, 150), (5, 150, 151), (5, 6, 150), (5, 6, 150, 151, 199)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_few_of_them(seed: int, kept: tuple[int, ...]) -> None:
    """Alone in their blocks of 128, or not."""
    given = columns([(1.0, -1, 1.0, 0.0)] * 3, seed)
    noise = -torch.log(-torch.log(uniform_noise(given[4], given[5], 200)))
    logits = torch.full((3, 200), -torch.inf)
    logits[:, kept] = (5.0 - noise).float()[:, kept]
    check(logits, given)


def test_noise_in_fp32() -> None:
    """As near the fp64 noise as the margin rests on, wherever the hash falls."""
    halves = torch.randint(0, 2**32, (4000, 2), generator=torch.Generator().manual_seed(0))
    halves[:1000, 0] >>= torch.arange(1000) % 33  # near 0
    halves[1000:2000, 0] = 0xFFFFFFFF ^ (halves[1000:2000, 0] >> torch.arange(1000) % 33)  # near 1
    bits = (halves[:, 0] << 32) | halves[:, 1]
    bits[:4] = torch.tensor([0, 4095, -1, -4096])
    small = torch.where(bits < 0, ~bits, bits)  # the distance from 1, or the number, in units of 2**-64
    small = ((small >> 12) << 12).double() + 2048
    exponential = torch.where(bits < 0, -torch.log1p(-small * 2.0**-64), -torch.log(small * 2.0**-64))
    found = torch.empty(4000, device=DEVICE)
    store_noise[(1,)](found, bits.to(DEVICE), N=4000, BLOCK=4096)
    assert (found.cpu().double() + exponential.log()).abs().max() < 4e-5


@triton.jit
def store_noise(out, bits, N: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, kernels.fast_noise(tl.load(bits + index, mask=index < N, other=0)), mask=index < N)


@pytest.mark.parametrize("extreme", [float("inf"), float("nan"), 3e38, -float("inf")])
def test_extreme_logits(extreme: float) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    logits[:, 7] = extreme
    given = columns([(1.0, -1, 1.0, 0.0), (0.5, -1, 1.0, 0.0)], 5)
    expected = logits.clone()
    if extreme != extreme:
        expected[:, 7] = -torch.inf  # a NaN is never drawn
    found = kernels.sample(logits.to(DEVICE), *(t.to(DEVICE) for t in given))
    assert found.cpu().tolist() == sample_reference(expected, *given).tolist()


def test_parameters_that_are_columns_of_a_matrix() -> None:
    logits = torch.randn(len(PARAMS), 200, generator=torch.Generator().manual_seed(1))
    given = columns(PARAMS, 5)
    strided = [torch.stack([x, x.flip(0)], dim=1).to(DEVICE)[:, 0] for x in given]
    assert not any(x.is_contiguous() for x in strided)
    assert kernels.sample(logits.to(DEVICE), *strided).cpu().tolist() == sample_reference(logits, *given).tolist()


def test_masked_logits() -> None:
    logits = torch.randn(len(PARAMS), 200, generator=torch.Generator().manual_seed(1))
    logits[:, 3:] = -torch.inf
    check(logits, columns(PARAMS, 5))


def test_only_kept_tokens_are_drawn() -> None:
    logits = torch.randn(1, 150, generator=torch.Generator().manual_seed(2)).repeat(10, 1)
    given = columns([(1.0, 3, 1.0, 0.0)] * 10, 6)
    best = set(logits[0].topk(3).indices.tolist())
    found = kernels.sample(logits.to(DEVICE), *(t.to(DEVICE) for t in given)).cpu().tolist()
    assert set(found) <= best and len(set(found)) > 1
