"""How fast the ranks of a job reach each other, and whether what arrives is what was sent."""

import dataclasses
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from octavo.distributed.collectives import all_gather_into, reduce_scatter_into
from octavo.distributed.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """One collective over all ranks.

    Attributes:
        name: of the collective.
        num_bytes: of the whole tensor.
        seconds: median of the slowest rank.
        is_right: every rank got the values that it should have.
    """

    name: str
    num_bytes: int
    seconds: float
    is_right: bool

    @property
    def gib_per_s(self) -> float:
        """The tensor's bytes over the time: what a program sees, not what is on a wire."""
        return self.num_bytes / self.seconds / 2**30


def describe_places(mesh: Mesh) -> list[str]:
    """Host and device of each rank, by rank; all must ask."""
    device = mesh.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return mesh.gather_objects(f"{socket.gethostname()}, {name}{f' {device.index}' if device.type == 'cuda' else ''}")


def measure_links(mesh: Mesh, num_bytes: int, repeats: int = 10) -> list[LinkSpeed]:
    """Time an all-reduce, an all-gather of bf16 and of FP8's bytes, a reduce-scatter and an all-to-all; all must ask.

    Args:
        num_bytes: of the whole tensor, about.
    """
    ranks, device = mesh.world_size, mesh.device
    n = max(num_bytes // (2 * ranks), 1)  # bf16 elements of a rank's piece
    of_rank = (torch.arange(ranks, device=device) % 2 + 1).bfloat16()  # whose codes and sums are exact
    own = torch.full((n,), mesh.rank % 2 + 1.0, device=device, dtype=torch.bfloat16)
    by_rank = of_rank.repeat_interleave(n)  # [ranks * n], the piece of each rank
    total = float(of_rank.sum())
    gathered, reduced = torch.empty_like(by_rank), torch.empty_like(own)
    codes = own.to(torch.float8_e4m3fn).view(torch.uint8)
    gathered_codes, spread = codes.new_empty(ranks * n), torch.empty_like(by_rank)
    summed, mine = own.clone(), torch.full_like(by_rank, mesh.rank % 2 + 1.0)
    collectives: tuple[tuple[str, int, Callable[[], object], Callable[[], bool]], ...] = (
        (
            "all-reduce of bf16",
            2 * n,
            lambda: dist.all_reduce(summed),
            lambda: bool((summed == total).all()),
        ),
        (
            "all-gather of bf16",
            2 * n * ranks,
            lambda: all_gather_into(gathered, own),
            lambda: torch.equal(gathered, by_rank),
        ),
        (
            "all-gather of FP8 codes",
            n * ranks,
            lambda: all_gather_into(gathered_codes, codes),
            lambda: torch.equal(gathered_codes.view(torch.float8_e4m3fn).to(torch.bfloat16), by_rank),
        ),
        (
            "reduce-scatter of bf16",
            2 * n * ranks,
            lambda: reduce_scatter_into(reduced, mine),
            lambda: bool((reduced == total).all()),
        ),
        (
            "all-to-all of bf16",
            2 * n * ranks,
            lambda: dist.all_to_all_single(spread, mine),
            lambda: torch.equal(spread, by_rank),
        ),
    )
    found = []
    for name, size, run, is_right in collectives:
        run()  # the first call makes the connections
        right = not mesh.any(not is_right())
        found.append(LinkSpeed(name, size, _time(run, mesh, repeats), right))
    return found


def _time(run: Callable[[], object], mesh: Mesh, repeats: int) -> float:
    """Median of the slowest rank's seconds."""
    times = []
    for _ in range(repeats):
        mesh.barrier()
        _wait(mesh)
        began = time.perf_counter()
        run()
        _wait(mesh)
        times.append(time.perf_counter() - began)
    slowest = [max(each) for each in zip(*mesh.gather_objects(times), strict=True)]
    return sorted(slowest)[len(slowest) // 2]


def _wait(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
