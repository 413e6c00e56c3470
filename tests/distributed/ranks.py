"""Runs a function on several gloo ranks of this machine, and the two-shot formula in plain torch."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.quiet import cores_alone

TIMEOUT = timedelta(seconds=60)


def run_ranks(function: Callable[[int, int], Any], world: int, backend: str = "gloo") -> list[Any]:
    """What function(rank, world) returned on each rank, under a process group; with NCCL each rank has a GPU."""
    # the server imports once and forks the ranks
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["octavo.nn", "torch.distributed.fsdp"])
    with cores_alone(), tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _run, args=(function, world, folder, backend), nprocs=world, start_method="forkserver"
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def _run(rank: int, function: Callable[[int, int], Any], world: int, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT)
    torch.save(function(rank, world), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def as_blocks(x: torch.Tensor, multiple: int = 128) -> torch.Tensor:
    """[blocks, 128], padded with zeros to a multiple of elements."""
    flat = x.reshape(-1)
    return torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)]).view(-1, 128)


def rounded(blocks: torch.Tensor) -> torch.Tensor:
    """E4M3 and back with a scale a block of 128; NaN where the block has a NaN or an infinity. Ordinary sizes only."""
    wide = blocks.float()
    amax = wide.abs().amax(dim=1, keepdim=True)
    factor = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)
    decoded = (wide * factor).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * (torch.ones_like(factor) / factor)
    return torch.where(amax.isfinite(), decoded, torch.nan)


def sum_in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One after the other in fp32."""
    total = tensors[0].float().clone()
    for tensor in tensors[1:]:
        total += tensor.float()
    return total


def two_shots(inputs: list[torch.Tensor], average: bool = False) -> torch.Tensor:
    """What an all-reduce of these ranks' tensors must give, in their shape and dtype."""
    world, first = len(inputs), inputs[0]
    total = sum_in_order([rounded(as_blocks(x, 128 * world)) for x in inputs])
    if average:
        total = total / torch.tensor(float(world))
    return rounded(total).view(-1)[: first.numel()].view(first.shape).to(first.dtype)
