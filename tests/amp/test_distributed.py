"""amp over two processes: a bad gradient or a spike on one of them is everyone's, so that levels never part."""

import math

import pytest
import torch

from octavo import amp
from tests.ranks import run_group

pytestmark = pytest.mark.slow


def run(rank: int, _: int) -> tuple[list[str], int, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = amp.Fallback(steps=2, window=8, min_losses=4, max_nonfinite_share=1.0)
    amp.initialize(model, optimizer, fallback=rule, grad_scaler="dynamic")
    handle, levels = amp.handle(optimizer), []
    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32)).square().mean() + 0.01 * step
        with amp.scale_loss(loss + (1000.0 if rank == 1 and step == 6 else 0.0), optimizer) as scaled_loss:
            scaled_loss.backward()
        if rank == 1 and step == 2:
            model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
        levels.append(handle.level)
    return levels, handle.num_skipped, handle.scaler.scale


def test_processes_agree():
    first, second = run_group(run, 2)
    assert first == second
    assert first == (["O1"] * 6 + ["O2"] * 2 + ["O1"] * 2, 1, 32768.0)
