"""linear_cross_entropy and token_logprobs against fp64 autograd: chunks, masks, ragged vocabularies, both devices."""

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError, ShapeError
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.nn.logprob import token_logprobs
from octavo.ops.logprob import chunks
from octavo.testing import assert_sqnr
from tests.assertions import assert_all_sqnr, assert_raises

# fp32 throughout; bf16 rounds the gradients of the logits, or the results alone, once (55 dB)
DTYPES = {"fp32": (torch.float32, 90.0), "bf16": (torch.bfloat16, 50.0)}
DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def make(generator, device, dtype="fp32", tokens=300, width=40, vocab=397):
    hidden = torch.randn(tokens, width, generator=generator)
    head = torch.randn(vocab, width, generator=generator) * 0.5
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[::5] = -100
    x, w = (y.to(device, DTYPES[dtype][0]).requires_grad_() for y in (hidden, head))
    return x, w, targets.to(device)


def exact_loss(hidden, head, targets, z_loss=0.0):
    """Sum of losses in fp64."""
    logits = hidden.double() @ head.double().t()
    z = (logits.logsumexp(-1) ** 2 * (targets != -100)).sum()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") + z_loss * z


@pytest.fixture
def small_chunks(monkeypatch):
    """Two chunks of tokens, whose logits come in halves, and four of the vocabulary."""
    for limit in ("MAX_CHUNK_BYTES", "MAX_SUMMED_CHUNK_BYTES"):
        monkeypatch.setattr(chunks, limit, 256 * 397 * 4)


def check_gradients(loss, wanted, hidden, head, min_db):
    got = torch.autograd.grad(loss, (hidden, head))
    want = torch.autograd.grad(wanted, (hidden, head))
    for name, g, w, x in zip(("hidden", "head"), got, want, (hidden, head), strict=True):
        assert g.dtype == x.dtype
        assert_sqnr(g, w, min_db, name)


@DTYPE
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_loss_and_gradients(dtype, z_loss, generator, device, small_chunks):
    hidden, head, targets = make(generator, device, dtype)
    wanted = exact_loss(hidden, head, targets, z_loss)
    loss = linear_cross_entropy(hidden, head, targets, reduction="sum", z_loss=z_loss)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    check_gradients(loss * 0.3, wanted * 0.3, hidden, head, DTYPES[dtype][1])


@DTYPE
@pytest.mark.parametrize("path", ["loss", "logprobs", "exact"])
def test_a_bias_of_the_head(dtype, path, generator, device, small_chunks):
    hidden, head, targets = make(generator, device, dtype)
    targets = targets.clamp_min(0)
    bias = (3 * torch.randn(397, generator=generator)).to(device, DTYPES[dtype][0]).requires_grad_()
    logits = hidden.double() @ head.double().t() + bias.double()
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    if path == "loss":
        loss = linear_cross_entropy(hidden, head, targets, reduction="sum", head_bias=bias)
    else:
        loss = -token_logprobs(hidden, head, targets, exact=path == "exact", head_bias=bias)[0].sum()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    inputs = (hidden, head, bias)
    assert_all_sqnr(torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs), DTYPES[dtype][1])


def test_reductions(generator, device):
    hidden, head, targets = make(generator, device)
    total = linear_cross_entropy(hidden, head, targets, reduction="sum")
    mean = linear_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(mean, total / 240)
    for count in (1000, torch.tensor(1000, device=device)):
        torch.testing.assert_close(linear_cross_entropy(hidden, head, targets, num_targets=count), total / 1000)
    check_gradients(mean, exact_loss(hidden, head, targets) / 240, hidden, head, 90.0)
    shifted = torch.where(targets == -100, 5, targets)
    torch.testing.assert_close(
        linear_cross_entropy(hidden, head, torch.where(targets == -100, 7, targets), ignore_index=7, reduction="sum"),
        exact_loss(hidden, head, torch.where(shifted == 7, -100, targets)).float(),
        rtol=1e-5,
        atol=0,
    )


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_side_has_no_gradient(frozen, generator, device):
    hidden, head, targets = make(generator, device)
    fixed, free = (hidden, head) if frozen == "hidden" else (head, hidden)
    fixed.requires_grad_(False)
    linear_cross_entropy(hidden, head, targets).backward()
    (want,) = torch.autograd.grad(exact_loss(hidden, head, targets) / 240, free)
    assert fixed.grad is None
    assert_sqnr(free.grad, want, 90.0)
    free.grad = None
    logprobs, _ = token_logprobs(hidden, head, targets.clamp_min(0))
    logprobs.sum().backward()
    assert fixed.grad is None and free.grad is not None


def test_without_gradients_the_loss_is_the_same(generator, device):
    operands = make(generator, device)
    with torch.no_grad():
        alone = linear_cross_entropy(*operands, reduction="sum")
    assert not alone.requires_grad
    torch.testing.assert_close(alone, linear_cross_entropy(*operands, reduction="sum"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_token_counts(tokens, generator, device):
    hidden, head, targets = make(generator, device, tokens=tokens)
    loss = linear_cross_entropy(hidden, head, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any() and not head.grad.any()
    logprobs, entropy = token_logprobs(hidden, head, targets.clamp_min(0))
    (logprobs * 0).sum().backward()
    assert logprobs.shape == entropy.shape == (tokens,)
    assert not head.grad.any()


def test_nan_reaches_the_loss(generator, device):
    hidden, head, targets = make(generator, device)
    hidden.data[1, 3] = float("nan")
    assert linear_cross_entropy(hidden, head, targets).isnan()
    ignored = targets.clone()
    ignored[1] = -100
    assert linear_cross_entropy(hidden, head, ignored).isfinite()


@DTYPE
@pytest.mark.parametrize(("chunk_size", "exact"), [(None, False), (64, False), (64, True)])
def test_token_logprobs(dtype, chunk_size, exact, generator, device, small_chunks):
    hidden, head, targets = make(generator, device, dtype)
    targets.clamp_min_(0)
    ours, entropy = token_logprobs(hidden, head, targets, temperature=0.7, exact=exact, chunk_size=chunk_size)
    log_p = torch.log_softmax(hidden.double() @ head.double().t() / 0.7, -1)
    wanted = log_p.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=2e-5)
    assert not entropy.requires_grad
    upstream = torch.randn(300, generator=generator).to(device)
    upstream[::7] = 0
    check_gradients((ours * upstream).sum(), (wanted * upstream).sum(), hidden, head, DTYPES[dtype][1])


def test_chunks_fit_the_memory_and_the_tiles():
    assert chunks.chunk_len(8192, 128256, 4) == 1024
    assert chunks.chunk_len(8192, 128256, 2) == 2048
    assert chunks.loss_chunks(40960, 128256, 2, needs_weight=True) == (8192, 2048)
    assert chunks.loss_chunks(40960, 128256, 2, needs_weight=False) == (2048, 512)
    assert chunks.loss_chunks(40960, 128256, 0, needs_weight=False) == (1024, 1024)
    assert chunks.chunk_len(300, 128256, 4) == 300
    assert chunks.chunk_len(0, 128256, 4) == 1
    assert chunks.chunk_len(5000, 1 << 30, 4) == chunks.QUANTUM
    for total in (1025, 9999, 128256):
        step = chunks.chunk_len(total, 8192, 6)
        assert step == total or step % chunks.QUANTUM == 0
        assert step * 8192 * 6 <= chunks.MAX_CHUNK_BYTES


def test_bad_input_is_refused(generator):
    hidden, head, targets = make(generator, "cpu")
    assert_raises(ShapeError, "must fit together", linear_cross_entropy, hidden, head, targets[:3])
    assert_raises(ConfigError, "'mean' or 'sum'", linear_cross_entropy, hidden, head, targets, reduction="none")
    with pytest.raises(ConfigError, match="num_targets divides a mean"):
        linear_cross_entropy(hidden, head, targets, reduction="sum", num_targets=3)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "vocab"), [(2048, 128256), (777, 50257)])
def test_a_real_vocabulary(tokens, vocab, generator):
    hidden, head, targets = make(generator, "cuda", "bf16", tokens, 512, vocab)
    wanted = exact_loss(hidden, head, targets)
    loss = linear_cross_entropy(hidden, head, targets, reduction="sum")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    check_gradients(loss, wanted, hidden, head, 50.0)
    upstream = torch.randn(tokens, generator=generator).cuda()
    ours, _ = token_logprobs(hidden, head, targets.clamp_min(0))
    log_p = torch.log_softmax(hidden.double() @ head.double().t(), -1).gather(1, targets.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(ours.double(), log_p, rtol=0, atol=1e-4)
    check_gradients((ours * upstream).sum(), (log_p * upstream).sum(), hidden, head, 50.0)


@pytest.mark.gpu
def test_the_logits_of_all_tokens_never_exist(generator):
    hidden, head, targets = make(generator, "cuda", "bf16", 8448, 256, 128256)  # more than token_logprobs keeps
    for function in (
        lambda: linear_cross_entropy(hidden, head, targets),
        lambda: token_logprobs(hidden, head, targets.clamp_min(0), with_entropy=False)[0].sum(),
    ):
        hidden.grad = head.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function().backward()
        used = torch.cuda.max_memory_allocated() - before
        assert used < (1 << 30) + 4 * head.numel() * 4  # all logits would be 4.3 GB in fp32
