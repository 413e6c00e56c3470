"""MasterAdamW with compact state: sums and clipping, state of another kind, a run; test_loop.py resumes one."""

import copy

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.ops.adamw import join_master
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train import train
from tests.run.test_optimizer import backward, make_model, run

from .conftest import MakeConfig

COMPACT = {"state_dtype": "fp8", "master_weights": "remainder"}


def test_one_micro_batch_keeps_no_copy_and_more_add_up_in_fp32() -> None:
    model = make_model(torch.bfloat16)
    optimizer = MasterAdamW(model, OptimizerSection(**COMPACT, max_grad_norm=0.0))
    backward(model, 0)
    own = model[0].weight.grad
    optimizer.accumulate_gradients()
    kept = optimizer._update._grads["0.weight"]
    assert kept is own
    total = own.float()
    for seed in (1, 2):
        backward(model, seed)
        total += model[0].weight.grad
        optimizer.accumulate_gradients()
        assert model[0].weight.grad is None
    assert torch.equal(optimizer._update._grads["0.weight"], total)
    assert not torch.equal(total, total.bfloat16().float())


def test_clipping_scales_and_measures_as_with_fp32_masters() -> None:
    full, compact = make_model(torch.bfloat16), make_model(torch.bfloat16)
    optimizers = [MasterAdamW(full, OptimizerSection()), MasterAdamW(compact, OptimizerSection(**COMPACT))]
    norms = []
    for model, optimizer in zip((full, compact), optimizers, strict=True):
        backward(model, 0)
        optimizer.accumulate_gradients()
        norms.append([optimizer.clip_gradients(bound).item() for bound in (0.0, 0.01, 0.0)])
        optimizer.step(lr=1e-3)
    assert norms[1] == pytest.approx(norms[0])
    assert norms[1][2] == pytest.approx(0.01, rel=1e-3)
    masters = optimizers[0].state_dict()
    state = optimizers[1].state_dict()
    for name, param in compact.named_parameters():
        master = join_master(param.detach(), state[f"remainder.{name}"])
        torch.testing.assert_close(master, masters[f"master.{name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("saved", "used", "message"),
    [
        ({}, COMPACT, r"has no param\.0\.weight \(it has exp_avg, exp_avg_sq, master\); go on with the state_dtype"),
        (COMPACT, {}, r"has no step \(it has exp_avg, exp_avg_scale, .* remainder\); go on with"),
        (COMPACT, {"state_dtype": "bf16", "master_weights": "remainder"}, r"exp_avg\.0\.weight is torch.float8_e4m3fn"),
    ],
)
def test_state_of_another_kind_is_refused_whole(saved: dict, used: dict, message: str) -> None:
    model = make_model(torch.bfloat16)
    optimizer = MasterAdamW(model, OptimizerSection(**saved))
    run(model, 2, optimizer=optimizer, num_parts=2)
    fresh = make_model(torch.bfloat16)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(CheckpointError, match=message):
        MasterAdamW(fresh, OptimizerSection(**used)).load_state_dict(optimizer.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


@pytest.mark.slow
def test_a_run_learns_as_with_fp32_state(make_config: MakeConfig) -> None:
    fields = {"run": {"steps": 30}, "metrics": {"eval_every": 0}, "checkpoint": {"every": 0}}
    full, compact = (
        train(make_config(name, optimizer={"lr": 1e-2, **extra}, **fields), progress=False)
        for name, extra in (("full", {}), ("compact", COMPACT))
    )
    assert compact.val_loss == pytest.approx(full.val_loss, rel=0.02)
    assert full.val_loss < full.rows[0].loss - 1.0
