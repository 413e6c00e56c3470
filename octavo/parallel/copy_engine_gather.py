"""FSDP2's all-gather by the copy engines of one host's GPUs, which take no time of the units that compute."""

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from octavo.distributed.collectives import all_gather_into
from octavo.distributed.symmetric import Shared, obstacle_to_sharing, share
from octavo.distributed.torch_private import gatherer_of, param_groups, set_gatherer

_ALIGNMENT = 2 << 20
logger = logging.getLogger(__name__)


class CopyEngineAllGather:
    """Each rank writes its shard into its place in every rank's buffer, which FSDP2 then copies out of.

    Between a buffer's last reader and its next writers is a barrier, and another one before what was written is read.
    A buffer is free again when FSDP2 has let go of the tensor that it was given, and its streams wait for the copy out
    of it: torch 2.11 to 2.13 do so in that order. Two buffers are in use at most as FSDP2 prefetches by itself, of the
    size of what the largest unit gathers; more where one's own prefetching asks for more. They stay until the model
    goes. A gather that the caller itself waits for (unshard(async_op=True)) goes by the process group, which has a
    stream of its own for it, and so does one over other ranks (reshard_after_forward=NUMBER).

    Args:
        group: process group of the shards.
        device: this rank's GPU.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank = group.rank()
        self._slots: list[_Slot] = []
        self._has_failed = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for a whole unit; all ranks ask for the same."""
        num_bytes = math.prod(size) * dtype.itemsize
        slot = next((slot for slot in self._slots if slot.is_free and slot.num_bytes >= num_bytes), None)
        if slot is None and num_bytes:
            self._drop_small()
            largest = max((one.num_bytes for one in self._slots), default=0)
            slot = self._new_slot(max(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT, largest))
        return torch.empty(*size, dtype=dtype, device=device) if slot is None else slot.lend(size, num_bytes, dtype)

    def _drop_small(self) -> None:
        """Give up what is free: a larger one takes its place."""
        small = [slot for slot in self._slots if slot.is_free]
        if small and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies out of it may be under way
        self._slots = [slot for slot in self._slots if slot not in small]

    @torch.inference_mode(False)  # training steps write into what an evaluation may have asked for
    def _new_slot(self, num_bytes: int) -> "_Slot | None":
        """None on every rank where any has no more memory to share."""
        if self._has_failed:
            return None
        logger.info("asking for a buffer of %.0f MiB for all-gathers by copy engines", num_bytes / 2**20)
        shared = share(self._group, self._device, num_bytes)
        if isinstance(shared, str):
            self._has_failed = True
            logger.warning("some all-gathers go by the process group, not by copy engines: %s", shared)
            return None
        self._slots.append(_Slot(shared, num_bytes))
        return self._slots[-1]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """On the current stream: what allocate gave, and this rank's part of it.

        Returns:
            With async_op, torch's Work.
        """
        slot = next((slot for slot in self._slots if slot.begin == output_tensor.data_ptr()), None)
        if slot is None or async_op or group.group_name != self._group.group_name:
            return all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)
        num_bytes = input_tensor.nbytes
        at = slice(self._rank * num_bytes, (self._rank + 1) * num_bytes)
        buffers, rank = slot.shared.buffers, self._rank
        slot.shared.barrier()
        for peer in (*range(rank + 1, len(buffers)), *range(rank)):  # each begins with another one
            buffers[peer][at].copy_(buffers[rank][at], non_blocking=True)
        slot.shared.barrier()
        return None


class _Slot:
    """A buffer on each rank, of which one tensor at a time is lent."""

    def __init__(self, shared: Shared, num_bytes: int) -> None:
        self.shared, self.num_bytes = shared, num_bytes
        self.begin = shared.buffers[shared.rank].data_ptr()
        self._lent: weakref.ref[torch.Tensor] | None = None

    @property
    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, size: Sequence[int], num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        lent = self.shared.buffers[self.shared.rank][:num_bytes].view(dtype).view(*size)
        self._lent = weakref.ref(lent)
        return lent


def gather_by_copy_engines(units: Sequence[Any]) -> str:
    """Let FSDP2 gather the parameters of some units by copy engines; every rank comes here alike.

    Args:
        units: modules that fully_shard was applied to, over one process group. Each costs no memory, all together two
            buffers of the largest one's gathered size.
    Returns:
        "", or why the ranks cannot share memory; units then keep their all-gather.
    """
    groups = [group for unit in units for group in param_groups(unit)]
    if not groups or gatherer_of(groups[0])[1].size() == 1:
        return "nothing is gathered"
    group, device = gatherer_of(groups[0])[1], groups[0].device
    if obstacle := obstacle_to_sharing(group, device):
        return obstacle
    if any(gatherer_of(one)[1].group_name != group.group_name for one in groups):
        return "the units are sharded over several process groups"
    comm = CopyEngineAllGather(group, device)
    for one in groups:
        set_gatherer(one, comm)
    return ""
