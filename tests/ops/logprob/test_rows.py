"""Row ops over logits against fp64 autograd, and their kernels against the reference on a GPU."""

import pytest
import torch

from octavo.errors import DtypeError, ShapeError
from octavo.ops.logprob import cross_entropy_rows, logit_grads, logit_rows
from octavo.testing import assert_sqnr
from tests.assertions import assert_raises

INF, NAN = float("inf"), float("nan")
SHAPES = [(1, 1), (5, 17), (40, 301), (3, 5000)]
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-V{s[1]}")


def make(shape, generator, device, dtype=torch.float32):
    logits = torch.randn(shape, generator=generator) * 5
    targets = torch.randint(0, shape[1], (shape[0],), generator=generator)
    return logits.to(device, dtype), targets.to(device)


@SHAPE
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics(shape, temperature, generator, device):
    logits, targets = make(shape, generator, device)
    lse, logprobs, entropy = logit_rows(logits, targets, temperature=temperature, with_entropy=True)
    z = logits.double() / temperature
    log_p = torch.log_softmax(z, -1)
    torch.testing.assert_close(lse.double(), z.logsumexp(-1), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(logprobs.double(), log_p.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=4e-6)
    assert logit_rows(logits, targets)[2] is None


@SHAPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_are_those_of_fp64(shape, dtype, generator, device):
    """In two pieces of the vocabulary, of which the second starts in the middle."""
    logits, targets = make(shape, generator, device)
    weights = torch.randn(shape[0], generator=generator).to(device)
    lse, *_ = logit_rows(logits, targets, temperature=0.7)
    pieces, half = [], shape[1] // 2
    for cols in (slice(0, half), slice(half, shape[1])):
        out = torch.full((shape[0], cols.stop - cols.start), NAN, device=device, dtype=dtype)
        pieces.append(
            logit_grads(logits[:, cols], lse, targets, weights, weights, out=out, temperature=0.7, first_col=cols.start)
        )
    exact = logits.double().requires_grad_()
    log_p = torch.log_softmax(exact / 0.7, -1).gather(1, targets[:, None])[:, 0]
    (want,) = torch.autograd.grad((log_p * weights).sum() * -0.7, exact)
    if shape[1] > 1:  # else nothing but the softmax's last bit is left
        assert_sqnr(torch.cat(pieces, 1), want, 95.0 if dtype == torch.float32 else 50.0)


@SHAPE
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy_is_that_of_fp64(shape, z_loss, generator, device):
    logits, targets = make(shape, generator, device)
    targets[::3] = -100
    grads = torch.full(shape, NAN, device=device)
    losses = cross_entropy_rows(logits, targets, grads=grads, z_loss=z_loss)
    exact = logits.double().requires_grad_()
    counts = targets != -100
    want = torch.nn.functional.cross_entropy(exact, targets, ignore_index=-100, reduction="none")
    want = want + z_loss * exact.logsumexp(-1) ** 2 * counts
    torch.testing.assert_close(losses.double(), want, rtol=2e-6, atol=4e-6)
    want.sum().backward()
    torch.testing.assert_close(grads.double(), exact.grad, rtol=1e-5, atol=2e-6)
    assert not grads[~counts].any()
    torch.testing.assert_close(cross_entropy_rows(logits, targets, z_loss=z_loss), losses, rtol=0, atol=0)


def special_rows(device):
    logits = torch.zeros(7, 24, device=device)
    logits[0, 3], logits[1, 3], logits[3, 3:] = NAN, INF, -INF
    logits[2] = -INF
    logits[4], logits[5, 3], logits[6] = -1e30, 3e38, NAN
    targets = torch.tensor([3, 3, 0, 1, 0, 3, -100], device=device)
    return logits, targets


def test_inf_and_nan_show_and_stay_in_their_row(device):
    logits, targets = special_rows(device)
    grads = torch.empty_like(logits)
    losses = cross_entropy_rows(logits, targets, grads=grads)
    assert losses.isnan().tolist() == [True, True, True, False, False, False, False]
    assert grads.isnan().any(-1).tolist() == [True, True, True, False, False, False, False]
    third = torch.tensor(3.0).log().item()
    torch.testing.assert_close(losses[3:].cpu(), torch.tensor([third, torch.tensor(24.0).log().item(), 0.0, 0.0]))
    assert grads[3, 3:].eq(0).all()  # a truncated vocabulary gets no gradient
    assert grads[6].eq(0).all()  # an ignored row has none, whatever its logits
    lse, logprobs, entropy = logit_rows(logits, targets.clamp_min(0), with_entropy=True)
    assert lse[2] == -INF
    assert logprobs[:3].isnan().all()
    torch.testing.assert_close(entropy[3:6].cpu(), torch.tensor([third, torch.tensor(24.0).log().item(), 0.0]))


def test_a_row_of_weight_zero_has_no_gradient(device):
    logits, targets = special_rows(device)
    zeros = torch.zeros(7, device=device)
    out = torch.full_like(logits, NAN)
    assert logit_grads(logits, zeros, targets, zeros, zeros, out=out).eq(0).all()


def test_rows_do_not_depend_on_the_batch(generator, device):
    logits, targets = make((40, 301), generator, device)
    whole = logit_rows(logits, targets, with_entropy=True)
    for rows in ([0], [39], list(range(39, -1, -3))):
        for part, all_rows in zip(logit_rows(logits[rows], targets[rows], with_entropy=True), whole, strict=True):
            torch.testing.assert_close(part, all_rows[rows], rtol=0, atol=0)


def test_no_rows(device):
    logits, targets = torch.zeros(0, 9, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    assert [x.shape for x in logit_rows(logits, targets, with_entropy=True)] == [(0,)] * 3
    assert cross_entropy_rows(logits, targets, grads=torch.empty_like(logits)).shape == (0,)


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match=r"logits must be \[T, V\]"):
        logit_rows(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))
    assert_raises(DtypeError, "targets int64", cross_entropy_rows, torch.zeros(2, 4), torch.zeros(2))
