"""Log-probabilities and sampling: formulas, truncation rules, distribution, and independence of the batch."""

import pytest
import torch

from octavo.errors import DtypeError, ShapeError
from octavo.ops.logprob import entropy, log_softmax, softmax, token_logprobs
from octavo.ops.sampling import request_seed, sample
from octavo.ops.sampling.reference import truncate, uniform_noise
from octavo.testing import assert_bitwise


def logits_of(generator, device, rows=40, vocab=301):
    return (torch.randn(rows, vocab, generator=generator) * 4).to(device)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_log_softmax(temperature, generator, device):
    logits = logits_of(generator, device)
    targets = torch.randint(0, 301, (40,), generator=generator).to(device)
    ours = token_logprobs(logits, targets, temperature)
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=4e-6)
    assert_bitwise(log_softmax(logits, temperature).gather(1, targets[:, None])[:, 0], ours)
    torch.testing.assert_close(softmax(logits, temperature).sum(-1), torch.ones(40, device=device))


def test_entropy(generator, device):
    logits = logits_of(generator, device)
    logits[0, 5:] = float("-inf")  # a truncated row stays finite
    p = torch.softmax(logits.double(), -1)
    expected = -(p * p.clamp_min(1e-300).log()).sum(-1)
    torch.testing.assert_close(entropy(logits).double(), expected, rtol=1e-5, atol=1e-5)


def test_logprob_rows_do_not_depend_on_the_batch(generator, device):
    logits = logits_of(generator, device)
    targets = torch.arange(40, device=device)
    whole = token_logprobs(logits, targets, 0.9)
    for rows in ([0], [39], [4, 20], list(range(39, -1, -3))):
        assert_bitwise(token_logprobs(logits[rows], targets[rows], 0.9), whole[rows])
    per_row = torch.full((40,), 0.9, device=device)
    assert_bitwise(token_logprobs(logits, targets, per_row), whole)


def draw(logits, seeds, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, positions=None):
    rows, device = logits.shape[0], logits.device
    params = (torch.full((rows,), value, device=device) for value in (temperature, top_k, top_p, min_p))
    if positions is None:
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
    return sample(logits, *params, torch.as_tensor(seeds, device=device), positions)


def test_sampling_follows_the_distribution(device):
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds = [request_seed(1, i, 0) for i in range(20000)]
    drawn = draw(p.log().expand(20000, 4).contiguous().to(device), seeds)
    share = torch.bincount(drawn.cpu(), minlength=4) / 20000
    assert (share - p).abs().max() < 4 * (0.25 / 20000) ** 0.5  # four standard deviations of the largest


def test_sampling_does_not_depend_on_the_batch(generator, device):
    logits = logits_of(generator, device)
    seeds = torch.tensor([request_seed(7, i, 0) for i in range(40)], device=device)
    positions = torch.arange(40, device=device)
    whole = draw(logits, seeds, 1.0, 50, 0.9, 0.01, positions)
    for rows in ([0], [39], [4, 20], list(range(39, -1, -3))):
        assert_bitwise(draw(logits[rows], seeds[rows], 1.0, 50, 0.9, 0.01, positions[rows]), whole[rows])
    other = draw(logits, seeds, 1.0, 50, 0.9, 0.01, positions + 1)
    assert not torch.equal(other, whole)


def test_greedy_and_mixed_rows(generator, device):
    logits = logits_of(generator, device)
    seeds = torch.arange(40, device=device)
    assert_bitwise(draw(logits, seeds, 0.0), logits.argmax(-1))
    temperature = torch.ones(40, device=device)
    temperature[::2] = 0.0
    off = torch.full((40,), -1, device=device), torch.ones(40, device=device), torch.zeros(40, device=device)
    mixed = sample(logits, temperature, *off, seeds, torch.zeros(40, dtype=torch.int64, device=device))
    assert_bitwise(mixed[::2], logits.argmax(-1)[::2])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (2, 1.0, 0.0, [1, 3]),
        (-1, 0.75, 0.0, [1, 3]),
        (-1, 0.81, 0.0, [0, 1, 3]),
        (-1, 1.0, 0.4, [1, 3]),
        (1, 0.1, 1.0, [1]),
    ],
)
def test_truncation(top_k, top_p, min_p, kept):
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    cut = truncate(logits, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert cut[0].isfinite().nonzero()[:, 0].tolist() == kept


def test_noise_is_uniform_and_never_0_or_1():
    u = uniform_noise(torch.arange(300), torch.zeros(300, dtype=torch.int64), 1000)
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert abs(u.mean() - 0.5) < 2e-3
    assert len(torch.unique(u)) == u.numel()


def test_request_seeds_differ():
    seeds = {request_seed(s, i, j) for s in range(5) for i in range(50) for j in range(8)}
    assert len(seeds) == 2000
    assert all(-(1 << 63) <= s < 1 << 63 for s in seeds)


def test_bad_input_is_refused():
    with pytest.raises(DtypeError, match="float32"):
        token_logprobs(torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="targets must have shape"):
        token_logprobs(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))
