"""amp over two processes: a bad gradient or a spike on one of them is everyone's, so that levels never part."""

import math
from pathlib import Path

import pytest
import torch

from octavo import amp
from tests.quiet import cores_alone

pytestmark = pytest.mark.slow


def run(rank: int, store: str, results: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
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
    Path(results, str(rank)).write_text(f"{levels} {handle.num_skipped} {handle.scaler.scale}")
    torch.distributed.barrier()  # who leaves first can take the other's threads down
    torch.distributed.destroy_process_group()


def test_processes_agree(tmp_path):
    with cores_alone():
        torch.multiprocessing.spawn(run, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    assert first == f"{['O1'] * 6 + ['O2'] * 2 + ['O1'] * 2} 1 32768.0"
