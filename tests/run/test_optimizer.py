"""MasterAdamW against torch's AdamW, and what bf16 parameters, accumulation and clipping add to it."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from octavo.distributed.norm import global_norm
from octavo.errors import CheckpointError, ConfigError
from octavo.ops.accumulate import add_gradients
from octavo.run import updates
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from tests.assertions import assert_raises

CONFIG = OptimizerSection(weight_decay=0.1, max_grad_norm=0.0)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 5)).to(dtype)


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


def run(
    model: nn.Module, num_steps: int, first: int = 0, optimizer: MasterAdamW | None = None, num_parts: int = 1
) -> MasterAdamW:
    optimizer = optimizer or MasterAdamW(model, CONFIG)
    for step in range(first, first + num_steps):
        for part in range(num_parts):
            backward(model, step + 100 * part)
            optimizer.accumulate_gradients()
        optimizer.clip_gradients(0.5)
        optimizer.step(lr=1e-2 / (step + 1))
    return optimizer


def torchs(params: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    """Its AdamW, which decays matrices alone."""
    groups = [{"params": [p], "weight_decay": 0.1 if p.dim() >= 2 else 0.0} for p in params]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


def test_fp32_equals_torch_bit_for_bit() -> None:
    ours, theirs = make_model(), make_model()
    run(ours, 5)
    adamw = torchs(theirs.parameters())
    for step in range(5):
        backward(theirs, step)
        norm = global_norm([p.grad for p in theirs.parameters()])
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]))
        torch.nn.utils.clip_grads_with_norm_(theirs.parameters(), 0.5, norm)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        adamw.step()
        adamw.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_bf16_parameters_are_rounded_masters() -> None:
    model = make_model(torch.bfloat16)
    optimizer = run(model, 3)
    state = optimizer.state_dict()
    for name, param in model.named_parameters():
        assert state[f"master.{name}"].dtype == torch.float32
        assert torch.equal(param, state[f"master.{name}"].bfloat16())
    # The masters hold what bf16 cannot: updates too small for it are not lost.
    assert not torch.equal(state["master.0.weight"], model[0].weight.float())


def test_bf16_equals_adamw_on_masters_bit_for_bit() -> None:
    model = make_model(torch.bfloat16)
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    reference = torchs(masters.values())
    optimizer = MasterAdamW(model, CONFIG)
    for step in range(4):
        backward(model, step)
        for name, param in model.named_parameters():
            masters[name].grad = param.grad.float()
        optimizer.accumulate_gradients()
        optimizer.step(lr=3e-3)
        for group in reference.param_groups:
            group["lr"] = 3e-3
        reference.step()
    assert all(torch.equal(p, masters[name].bfloat16()) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_in_fp32(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = MasterAdamW(model, CONFIG)
    total = torch.zeros_like(model[0].weight, dtype=torch.float32)
    for seed in range(3):
        backward(model, seed)
        if dtype == torch.bfloat16:
            total += model[0].weight.grad
        optimizer.accumulate_gradients()
    if dtype == torch.float32:
        total = model[0].weight.grad.clone()
    else:
        assert all(p.grad is None for p in model.parameters())
    norm = optimizer.clip_gradients(0.0)
    assert norm >= torch.linalg.vector_norm(total)
    before = optimizer.state_dict()["master.0.weight"].clone()
    optimizer.step(lr=1.0)
    moved = optimizer.state_dict()["master.0.weight"] - before * (1 - 0.1)
    assert torch.equal(torch.sign(moved), -torch.sign(total))


@pytest.mark.parametrize("most", [1, 300])
@pytest.mark.parametrize("state", [{}, {"state_dtype": "fp8", "master_weights": "remainder"}], ids=["full", "compact"])
def test_gradients_are_added_up_some_at_a_time(
    state: dict[str, str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, sizes = [make_model(torch.bfloat16) for _ in range(2)], list[int]()
    for model in models:
        if model is models[1]:
            monkeypatch.setattr(updates, "_MOST_TOGETHER", most)
            monkeypatch.setattr(updates, "add_gradients", lambda *x: (sizes.append(len(x[0])), add_gradients(*x)))
        run(model, 2, optimizer=MasterAdamW(model, CONFIG.model_copy(update=state)), num_parts=3)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    assert set(sizes) == ({1} if most == 1 else {2, 4})  # of 288, 24, 24, 24, 120 and 5 elements


def test_clipping_returns_the_norm_before_it() -> None:
    model = make_model()
    optimizer = MasterAdamW(model, CONFIG)
    backward(model, 0)
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert optimizer.clip_gradients(0.0) == pytest.approx(expected.item())
    assert optimizer.clip_gradients(0.01) == pytest.approx(expected.item())
    assert optimizer.clip_gradients(0.0) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("state", [{}, {"state_dtype": "fp8", "master_weights": "remainder"}], ids=["full", "compact"])
def test_norm_shows_a_bad_gradient(state: dict[str, str], bad: float) -> None:
    model = make_model(torch.bfloat16)
    optimizer = MasterAdamW(model, CONFIG.model_copy(update=state))
    backward(model, 0)
    model[1].weight.grad[3] = bad
    optimizer.accumulate_gradients()
    assert not torch.isfinite(optimizer.clip_gradients(1.0))
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.accumulate_gradients()
    assert torch.isfinite(optimizer.clip_gradients(1.0))


@pytest.mark.parametrize(
    ("state_dtype", "master_weights"),
    [("fp32", "fp32"), ("fp8", "remainder"), ("fp8", "fp32"), ("bf16", "none"), ("fp32", "remainder")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_bit_for_bit(dtype: torch.dtype, state_dtype: str, master_weights: str) -> None:
    config = CONFIG.model_copy(update={"state_dtype": state_dtype, "master_weights": master_weights})
    whole, first, second = (make_model(dtype) for _ in range(3))
    run(whole, 6, optimizer=MasterAdamW(whole, config), num_parts=2)
    state = copy.deepcopy(run(first, 3, optimizer=MasterAdamW(first, config), num_parts=2).state_dict())
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    optimizer = MasterAdamW(second, config)
    optimizer.load_state_dict(state)
    run(second, 3, first=3, optimizer=optimizer, num_parts=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_block_scales_that_were_saved_flat_are_taken() -> None:
    config = CONFIG.model_copy(update={"state_dtype": "fp8", "master_weights": "remainder"})
    optimizers = []
    for seed in range(2):
        model = nn.Linear(256, 3).bfloat16()
        optimizers.append(MasterAdamW(model, config))
        model(torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()).sum().backward()
        optimizers[-1].step()
    saved = optimizers[0].state_dict()
    assert saved["exp_avg_scale.weight"].shape == (3, 2)
    flat = {key: tensor.flatten() if "_scale." in key else tensor for key, tensor in saved.items()}
    optimizers[1].load_state_dict(flat)
    loaded = optimizers[1].state_dict()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved if "fp8" not in str(saved[key].dtype))


def test_state_is_plain() -> None:
    fresh = MasterAdamW(make_model(torch.bfloat16), CONFIG).state_dict()
    assert all(isinstance(tensor, torch.Tensor) for tensor in fresh.values())
    assert fresh["step"] == 0
    assert {key.split(".")[0] for key in fresh} == {"master", "step"}
    trained = run(make_model(torch.bfloat16), 1).state_dict()
    assert {key.split(".")[0] for key in trained} == {"master", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("damage", ["missing", "shape", "step"])
def test_wrong_state_is_refused_whole(damage: str) -> None:
    model = make_model(torch.bfloat16)
    state = dict(run(make_model(torch.bfloat16), 2).state_dict())
    if damage == "missing":
        del state["exp_avg.2.bias"]
    elif damage == "shape":
        state["exp_avg.2.bias"] = torch.zeros(6)
    else:
        del state["step"]
    before = copy.deepcopy(model.state_dict())
    assert_raises(CheckpointError, r"exp_avg\.2\.bias|no step", MasterAdamW(model, CONFIG).load_state_dict, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_torchs_schedulers_and_its_plain_loop_drive_it(state_dtype: str) -> None:
    """backward, step, zero_grad and an LR scheduler, as with any optimizer: the bits of rates given by hand."""
    config = CONFIG.model_copy(update={"state_dtype": state_dtype, "lr": 1e-2})
    by_hand, scheduled = make_model(torch.bfloat16), make_model(torch.bfloat16)
    ours, theirs = MasterAdamW(by_hand, config), MasterAdamW(scheduled, config)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(theirs, gamma=0.5)
    assert isinstance(theirs, torch.optim.Optimizer)
    for step in range(4):
        backward(by_hand, step)
        ours.accumulate_gradients()
        ours.step(lr=1e-2 * 0.5**step)
        backward(scheduled, step)
        theirs.step()
        theirs.zero_grad()
        scheduler.step()
        assert all(torch.equal(a, b) for a, b in zip(by_hand.parameters(), scheduled.parameters(), strict=True))
    assert theirs.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**4)
    assert_raises(ConfigError, None, theirs.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})
