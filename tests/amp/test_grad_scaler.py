"""Dynamic gradient scaling: the rule, exactness of powers of two, accumulation, and fp16 kept from underflow."""

import math

import pytest
import torch

from octavo import amp
from octavo.errors import ConfigError
from octavo.testing import assert_bitwise


def make(device="cpu", seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return *amp.initialize(model, optimizer, **options), amp.handle(optimizer)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def backward(model, optimizer, x, factor=1.0, **options):
    with amp.scale_loss(factor * model(x).square().mean(), optimizer, **options) as loss:
        loss.backward()


def test_the_rule():
    scaler = amp.GradScaler(init_scale=8.0, growth_interval=3, min_scale=2.0, max_scale=16.0)
    seen = []
    for overflowed in (False, False, False, True, True, True, False, True, False, False, False, False, False, False):
        scaler.update(overflowed=overflowed)
        seen.append(scaler.scale)
    assert seen == [8, 8, 16, 8, 4, 2, 2, 2, 2, 2, 4, 4, 4, 8]
    assert scaler.num_overflows == 4
    scaler.update(overflowed=False)
    other = amp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.num_good, other.num_overflows) == (8.0, 1, 4)


@pytest.mark.parametrize(
    "fields", [{"init_scale": 0.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}, {"growth_interval": 0}]
)
def test_a_rule_without_sense_is_refused(fields):
    with pytest.raises(ConfigError):
        amp.GradScaler(**fields)


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_a_power_of_two_changes_no_bit_of_an_fp8_step(device, recipe):
    """The scales of FP8 move with the loss scale, the codes do not."""
    x = torch.randn(16, 32, device=device)
    results = []
    for scaler in (None, amp.GradScaler(init_scale=2.0**12)):
        model, optimizer, handle = make(device, recipe=recipe, grad_scaler=scaler)
        backward(model, optimizer, x)
        results.append(gradients(model))
        assert handle.step()
        results[-1] += [p.detach() for p in model.parameters()]
    for plain, scaled in zip(*results, strict=True):
        assert_bitwise(scaled, plain)


def test_micro_batches_add_up_whether_unscaled_late_or_not():
    x, found = torch.randn(16, 32), []
    for options in ({}, {"delay_unscale": True}):
        model, optimizer, _ = make(grad_scaler="dynamic")
        backward(model, optimizer, x[:8], 0.5, **options)
        backward(model, optimizer, x[8:], 0.5)
        found.append(gradients(model))
    model, optimizer, _ = make()
    backward(model, optimizer, x[:8], 0.5)
    backward(model, optimizer, x[8:], 0.5)
    for plain, late, early in zip(gradients(model), *found, strict=True):
        assert_bitwise(late, plain)
        assert_bitwise(early, plain)


def test_a_micro_batch_that_raises_leaves_gradients_unscaled():
    x = torch.randn(16, 32)
    model, optimizer, _ = make(grad_scaler=amp.GradScaler(init_scale=2.0**10))
    backward(model, optimizer, x)
    expected = gradients(model)
    with pytest.raises(MemoryError), amp.scale_loss(model(x).sum(), optimizer):
        raise MemoryError
    for got, want in zip(gradients(model), expected, strict=True):
        assert_bitwise(got, want)


def test_sparse_gradients_are_unscaled_and_looked_at():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 32, sparse=True), torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, grad_scaler=amp.GradScaler(init_scale=2.0**10))
    ids = torch.tensor([3, 3, 5])
    model(ids).square().mean().backward()
    expected = model[0].weight.grad.to_dense()
    optimizer.zero_grad()
    backward(model, optimizer, ids)
    assert_bitwise(model[0].weight.grad.to_dense(), expected)
    optimizer.step()
    before = model[0].weight.detach().clone()
    backward(model, optimizer, ids, factor=math.inf)
    optimizer.step()
    assert amp.handle(optimizer).num_skipped == 1 and torch.equal(model[0].weight, before)


def test_a_handle_unscales_what_was_left_scaled():
    x = torch.randn(8, 32)
    model, optimizer, handle = make(grad_scaler="dynamic")
    backward(model, optimizer, x, delay_unscale=True)
    handle.unscale_gradients()
    handle.unscale_gradients()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    plain, plain_optimizer, _ = make()
    backward(plain, plain_optimizer, x)
    assert_bitwise(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    handle.step()
    plain_optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bitwise(a.detach(), b.detach())


def test_overflow_skips_the_step_and_halves_the_scale(device):
    x = torch.randn(8, 32, device=device)
    scaler = amp.GradScaler(growth_interval=2)
    model, optimizer, handle = make(device, opt_level="O2", dtype=torch.float16, grad_scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, optimizer, x, 1e4)  # 65536e4 / 64 is beyond fp16
    optimizer.step()
    assert handle.num_skipped == 1 and handle.scaler.num_overflows == 1
    assert handle.scaler.scale == 2.0**15
    assert "gradients that are not finite, of " in handle.events[0].reason
    assert handle.events[0].reason.endswith("; loss scale 65536 -> 32768")
    for a, b in zip(before, model.parameters(), strict=True):
        assert_bitwise(b.detach(), a)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, optimizer, x)
        assert handle.step()
    assert handle.scaler.scale == 2.0**16


def test_fp16_trains_by_scaling_and_not_without(device):
    """A loss so small that its gradients are no fp16 numbers: scaled, they are those of fp32."""
    x = torch.randn(8, 32, device=device)
    model, optimizer, handle = make(device, opt_level="O2", dtype=torch.float16)
    assert handle.scaler is not None
    backward(model, optimizer, x, 1e-7)
    scaled = gradients(model)
    model, optimizer, _ = make(device, opt_level="O2", dtype=torch.float16, grad_scaler=amp.GradScaler(init_scale=1.0))
    backward(model, optimizer, x, 1e-7)
    assert all(not grad.any() for grad in gradients(model)[:2])
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    (1e-7 * plain(x).square().mean()).backward()
    for grad, expected in zip(scaled, gradients(plain), strict=True):
        torch.testing.assert_close(grad, expected, rtol=0.02, atol=float(expected.abs().max()) * 0.02)


def test_an_fp16_loss_can_be_scaled():
    assert amp.GradScaler().scale_loss(torch.tensor(2.0, dtype=torch.float16)).item() == 2.0**17


def test_loss_of_nan_is_skipped():
    model, optimizer, handle = make()
    backward(model, optimizer, torch.full((4, 32), math.nan))
    assert not handle.step()
    assert handle.num_skipped == 1
