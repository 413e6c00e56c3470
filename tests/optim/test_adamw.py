"""octavo.optim.AdamW: torch's habits, plain state that continues bit for bit, the bytes it takes, and its learning."""

import copy
import functools
import io

import pytest
import torch
from torch import nn

from octavo.errors import CheckpointError, ConfigError, DtypeError
from octavo.optim import AdamW
from octavo.testing import assert_bitwise
from tests.assertions import assert_all_bitwise, assert_raises

MODES = [(state, master) for state in ("fp32", "bf16", "fp8") for master in ("fp32", "remainder", None)]


def make_model(dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16)).to(dtype).to(device)


def loss_of(model: nn.Module, seed: int, noise: float = 0.1) -> torch.Tensor:
    """Regression onto a fixed random map."""
    param = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 32, generator=generator)
    target = torch.tanh(x @ torch.randn(32, 16, generator=torch.Generator().manual_seed(99)) / 8)
    target = target + noise * torch.randn(64, 16, generator=generator)
    return (model(x.to(param)).float() - target.to(param.device)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fp32_is_torchs_but_for_rounding() -> None:
    ours, theirs = make_model(torch.float32), make_model(torch.float32)
    train(ours, AdamW(ours.parameters(), lr=1e-3), 20)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1), 20)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("state_dtype", "master_weights"), MODES)
def test_it_continues_bit_for_bit_from_a_file(state_dtype: str, master_weights: str | None, device) -> None:
    fields = {"lr": 1e-2, "state_dtype": state_dtype, "master_weights": master_weights}
    whole = make_model(device=device)
    optimizer = AdamW(whole.parameters(), **fields)
    train(whole, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(whole, optimizer, 3, first=3)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_model(device=device)
    resumed.load_state_dict(saved["model"])
    again = AdamW(resumed.parameters(), **fields)
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, 3, first=3)
    assert_all_bitwise(whole.parameters(), resumed.parameters())
    for a, b in zip(optimizer.state.values(), again.state.values(), strict=True):
        for name in a:
            assert_bitwise(b[name], a[name], name)


@pytest.mark.parametrize(
    ("state_dtype", "master_weights", "expected"),
    [("fp32", "fp32", 12.0), ("bf16", "remainder", 6.0), ("fp8", "remainder", 4.0625), ("fp8", None, 2.0625)],
)
def test_bytes_of_state(state_dtype: str, master_weights: str | None, expected: float) -> None:
    param = nn.Parameter(torch.randn(512, 1024).bfloat16())
    optimizer = AdamW([param], state_dtype=state_dtype, master_weights=master_weights)
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert optimizer.num_state_bytes == expected * param.numel() + 4  # and the step
    dtypes = {tensor.dtype for tensor in optimizer.state[param].values()}
    assert (torch.float8_e4m3fn in dtypes) == (state_dtype == "fp8")


@functools.cache
def final_loss(state_dtype: str, master_weights: str | None) -> float:
    """Mean loss of the last 50 of 200 steps; the first is 0.41, fp32 state ends at 0.0260."""
    model = make_model()
    fields = {"state_dtype": state_dtype, "master_weights": master_weights}
    losses = train(model, AdamW(model.parameters(), lr=3e-3, **fields), 200)
    return sum(losses[-50:]) / 50


@pytest.mark.parametrize(
    ("state_dtype", "master_weights", "bound"),
    [pytest.param("bf16", "remainder", 0.002, marks=pytest.mark.largest), ("fp8", "remainder", 0.005)],
)
def test_it_learns_as_fp32_does(state_dtype: str, master_weights: str | None, bound: float) -> None:
    expected = final_loss("fp32", "fp32")
    assert expected < 0.05
    assert abs(final_loss(state_dtype, master_weights) / expected - 1) < bound


def test_without_masters_small_updates_are_not_lost() -> None:
    """lr is 1/50 of the spacing of bf16 at 1: rounding to nearest would never move."""
    param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=2.0**-8 / 50, weight_decay=0.0, state_dtype="fp8", master_weights=None)
    for _ in range(50):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert (1 - param.float().mean()).item() == pytest.approx(2.0**-8, rel=0.1)


def test_learning_rate_may_be_a_tensor() -> None:
    a, b = make_model(), make_model()
    train(a, AdamW(a.parameters(), lr=2.0**-9, state_dtype="fp8"), 3)
    train(b, AdamW(b.parameters(), lr=torch.tensor(2.0**-9), state_dtype="fp8"), 3)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_schedulers_and_closures_work() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.step(closure) < first
    assert optimizer.param_groups[0]["lr"] < 1e-2


def test_groups_have_settings_of_their_own() -> None:
    model = make_model()
    optimizer = AdamW([{"params": model[0].parameters()}], state_dtype="fp8", master_weights="remainder")
    optimizer.add_param_group({"params": model[3].parameters(), "state_dtype": "fp32", "weight_decay": 0.0})
    train(model, optimizer, 2)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float8_e4m3fn
    assert optimizer.state[model[3].weight]["exp_avg"].dtype == torch.float32
    assert "remainder" in optimizer.state[model[3].weight]


def test_given_gradients_and_their_scale() -> None:
    a, b = (nn.Parameter(torch.ones(300, dtype=torch.bfloat16)) for _ in range(2))
    one, two = (AdamW([p], state_dtype="fp8", master_weights="remainder") for p in (a, b))
    grad = torch.randn(300, generator=torch.Generator().manual_seed(0))
    one.step(grads={a: grad}, grad_scale=torch.tensor(0.25))
    two.step(grads={b: grad * 0.25})
    assert_bitwise(a, b)
    assert a.grad is None
    assert len(two.state) == 1
    two.step(grads={})
    assert two.state[b]["step"] == 1


def test_parameters_without_gradients_keep_their_step() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), state_dtype="fp8")
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    assert set(optimizer.state) == {model[0].weight}


def test_copies_are_independent() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), state_dtype="fp8", master_weights="remainder")
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    other = AdamW(make_model().parameters(), state_dtype="fp8", master_weights="remainder")
    other.load_state_dict(saved)
    train(model, optimizer, 1, first=1)
    loaded = next(iter(other.state.values()))
    assert loaded["step"] == 1
    assert_bitwise(loaded["exp_avg"], saved["state"][0]["exp_avg"])


def test_block_scales_that_were_saved_flat_are_taken() -> None:
    """As they were until state was cut by rows."""
    param = nn.Parameter(torch.ones(4, 256, dtype=torch.bfloat16))
    optimizers = [AdamW([param], state_dtype="fp8") for _ in range(2)]
    param.grad = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizers[0].step()
    saved = copy.deepcopy(optimizers[0].state_dict())
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        assert saved["state"][0][name].shape == (4, 2)
        saved["state"][0][name] = saved["state"][0][name].flatten()
    optimizers[1].load_state_dict(saved)
    for name, tensor in optimizers[0].state[param].items():
        assert_bitwise(optimizers[1].state[param][name], tensor, name)


def test_wrong_state_is_refused_whole() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), state_dtype="fp8")
    train(model, optimizer, 1)
    bad = copy.deepcopy(optimizer.state_dict())
    bad["state"][2]["exp_avg"] = bad["state"][2]["exp_avg"].float()
    before = copy.deepcopy(optimizer.state_dict())
    assert_raises(CheckpointError, "with state_dtype='fp8'", optimizer.load_state_dict, bad)
    for key, state in before["state"].items():
        assert_all_bitwise(optimizer.state_dict()["state"][key].values(), state.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ({"betas": (1.0, 0.9)}, "betas must be in"),
        ({"eps": 0.0}, "eps must be > 0"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0"),
        ({"state_dtype": "fp4"}, "state_dtype must be one of"),
        ({"master_weights": "bf16"}, "master_weights must be one of"),
    ],
)
def test_bad_settings_are_refused(fields: dict, message: str) -> None:
    assert_raises(ConfigError, message, AdamW, [nn.Parameter(torch.ones(2))], **fields)


def test_bad_parameters_are_refused() -> None:
    assert_raises(DtypeError, "needs bfloat16", AdamW, [nn.Parameter(torch.ones(2).half())], master_weights="remainder")
    assert_raises(DtypeError, "float64", AdamW, [nn.Parameter(torch.ones(2).double())])


@pytest.mark.gpu
def test_a_captured_step_is_the_step() -> None:
    plain, captured = make_model(device="cuda"), make_model(device="cuda")
    lr = torch.tensor(1e-2, device="cuda")
    fields = {"lr": lr, "state_dtype": "fp8", "master_weights": "remainder"}
    optimizers = [AdamW(m.parameters(), **fields) for m in (plain, captured)]
    for model, optimizer in zip((plain, captured), optimizers, strict=True):
        optimizer.init_state()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for seed in range(3):
        for a, b in zip(plain.parameters(), captured.parameters(), strict=True):
            grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed)).to(a)
            a.grad.copy_(grad)
            b.grad.copy_(grad)
        optimizers[0].step()
        graph.replay()
    for a, b in zip(plain.parameters(), captured.parameters(), strict=True):
        assert_bitwise(b, a)
