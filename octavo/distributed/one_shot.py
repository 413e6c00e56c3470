"""Small messages among the GPUs of one host, a kernel each (ops.one_shot): what decoding with several GPUs waits for.

Larger ones, other hosts and gloo take the process group's collectives, with the same bits but for sums of more than
two ranks, which a backend adds in an order of its own.
"""

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist

from octavo.distributed.symmetric import Shared, obstacle_to_sharing, share
from octavo.ops.one_shot import Places

# What a rank sends at most; above it NCCL's bandwidth counts for more than the one kernel's latency.
MAX_SENT_BYTES = 256 << 10
MAX_SENT_BYTES_OF_TWO = 4 << 20

logger = logging.getLogger(__name__)


class OneShot:
    """Staging memory, packets, flags and counters of a rank; all ranks make their calls in one order, on one stream.

    A rank that dies leaves the others waiting in a kernel until their processes are ended.

    Args:
        shared: buffers of num_bytes(ranks), zeros.
    """

    def __init__(self, shared: Shared) -> None:
        from octavo.ops.one_shot import triton

        self._kernels, self._shared = triton, shared  # which keeps the memory
        world, own = len(shared.buffers), shared.buffers[shared.rank]
        own.zero_()
        addresses = [buffer.data_ptr() for buffer in shared.buffers]
        staging = torch.tensor(addresses, dtype=torch.int64, device=own.device)
        flags = staging + staging_bytes(world)
        counters = torch.zeros(triton.MOST, dtype=torch.int32, device=own.device)
        self.places = Places(staging, flags, flags + flag_bytes(world), counters, shared.rank, world)
        torch.cuda.synchronize(own.device)
        shared.barrier()  # zeros everywhere before a rank sets a flag
        torch.cuda.synchronize(own.device)
        sent = MAX_SENT_BYTES_OF_TWO if world == 2 else MAX_SENT_BYTES // (world - 1)
        self.max_bytes = min(sent, triton.MOST * triton.REGION_BYTES)

    def gather_columns(self, piece: torch.Tensor) -> torch.Tensor | None:
        """Every rank's columns [T, n] contiguous, by rank: [T, ranks * n]; None for what does not fit."""
        if piece.nbytes > self.max_bytes or piece.shape[1] * piece.itemsize % 4:
            return None
        out = piece.new_empty(piece.shape[0], self.places.world * piece.shape[1])
        self._kernels.gather(piece.view(torch.int32), out.view(torch.int32), None, None, self.places)
        return out

    def gather_codes(self, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Columns of codes [T, n] uint8 and of scales, stored as [n / 128, T] fp32; None for what does not fit."""
        if codes.nbytes + scales.nbytes > self.max_bytes:
            return None
        out = codes.new_empty(codes.shape[0], self.places.world * codes.shape[1])
        out_scales = scales.new_empty(self.places.world * scales.shape[0], scales.shape[1])
        x, joined, rest, joined_rest = (each.view(torch.int32) for each in (codes, out, scales, out_scales))
        self._kernels.gather(x, joined, rest, joined_rest, self.places)
        return out, out_scales

    def add(self, part: torch.Tensor) -> torch.Tensor | None:
        """The sum of all ranks' parts, in fp32 in the order of the ranks, in their dtype; None if it does not fit."""
        if part.nbytes > self.max_bytes or part.dtype not in (torch.bfloat16, torch.float32):
            return None
        part = part.contiguous()
        out = torch.empty_like(part)
        self._kernels.add(part, out, self.places)
        return out


def staging_bytes(world: int) -> int:
    """Of the regions of two turns."""
    from octavo.ops.one_shot.triton import MOST, REGION_BYTES

    return 2 * world * MOST * REGION_BYTES


def flag_bytes(world: int) -> int:
    """Of the flags."""
    from octavo.ops.one_shot.triton import MOST

    return world * MOST * 4


def num_bytes(world: int) -> int:
    """Of a rank's buffer: staging, flags and packets."""
    from octavo.ops.one_shot.triton import FEW, PACKETS

    return staging_bytes(world) + flag_bytes(world) + 2 * world * FEW * PACKETS * 8


_kept: weakref.WeakKeyDictionary[Any, OneShot | str] = weakref.WeakKeyDictionary()


def one_shot_of(group: Any, device: torch.device) -> OneShot | None:
    """What the ranks of a group share, made at the first call, which all of them make; None where they cannot."""
    group = dist.group.WORLD if group is None else group
    kept = _kept.get(group)
    if kept is None:
        obstacle = obstacle_to_sharing(group, device)
        shared = obstacle if obstacle is not None else share(group, device, num_bytes(dist.get_world_size(group)))
        kept = _kept[group] = shared if isinstance(shared, str) else OneShot(shared)
        if isinstance(kept, str):
            logger.info("small messages go by the process group's collectives: %s", kept)
    return None if isinstance(kept, str) else kept
