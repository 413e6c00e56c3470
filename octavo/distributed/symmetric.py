"""Memory of the GPUs of one host that each rank reads and writes directly: two_shot.py's way without NCCL.

The only file that uses torch's symmetric memory, of which it takes peers' addresses and a barrier, no multicast.
"""

import logging
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from octavo import env
from octavo.distributed.outcome import all_do, together
from octavo.distributed.packed import Packed
from octavo.ops.packed import BLOCK

MAX_RANKS = 8
# Elements that travel together: a workspace is as large as what came so far, in these bounds.
MIN_NUMEL, MAX_NUMEL = 16 << 20, 256 << 20
_BLOCK_BYTES = BLOCK + 4
_ALIGNED_BLOCKS = 32  # whose bytes are a multiple of 128
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # two containers of a host may share its name

logger = logging.getLogger(__name__)


class Shot(NamedTuple):
    """How pieces get from one rank to another: who makes one writes it into its reader's memory.

    Attributes:
        write: int64, bytes from a workspace's first slot to where each piece is written, in other ranks' memory too.
        read: int64, to where each piece is read, in this rank's own, by rank.
    """

    write: torch.Tensor
    read: torch.Tensor


class Shared(NamedTuple):
    """A buffer on each rank that all of them read and write.

    Attributes:
        buffers: [bytes] uint8 of each rank, this one's too, by rank; as long on all of them.
        rank: this one.
        barrier: orders what all ranks do before it before what they do after it, in their current streams.
    """

    buffers: list[torch.Tensor]
    rank: int
    barrier: Callable[[], None]


class Workspace:
    """A buffer of each rank: slots for a piece of every rank, one lot for what is summed and one for sums.

    Between a rank's writes and another's reads is a barrier, two for a message; a slot is written again only after a
    barrier that its readers entered when they had done so. Takes 2.06 bytes an element of the longest message.

    Args:
        shared: whose memory it is.
    """

    def __init__(self, shared: Shared) -> None:
        self._buffers, self.rank, self.barrier = shared
        self.num_blocks = slot_blocks(len(self._buffers[self.rank]), len(self._buffers))
        self._slots = [buffer.view(2, len(self._buffers), self.num_blocks * _BLOCK_BYTES) for buffer in self._buffers]
        self.shots = self._make_shots()
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self.is_largest = False  # ranks had no more memory

    def first_slot(self, num_blocks: int) -> Packed:
        """A piece of so many blocks; those in other slots lie as many bytes behind it as a Shot says."""
        return Packed(self._buffers[self.rank][None, : num_blocks * _BLOCK_BYTES], num_blocks)

    def _make_shots(self) -> tuple[Shot, Shot]:
        """Piece i of every rank to rank i, and rank i's sum to every rank."""
        slots, me = self._slots, self.rank
        ranks = range(len(slots))
        others = [*range(me + 1, len(slots)), *range(me)]  # each rank begins with another one
        return (
            Shot(self._places([slots[i][0, me] for i in ranks]), self._places([slots[me][0, i] for i in ranks])),
            Shot(
                self._places([slots[i][1, me] for i in (*others, me)]), self._places([slots[me][1, i] for i in ranks])
            ),
        )

    def _places(self, slots: list[torch.Tensor]) -> torch.Tensor:
        own = self._buffers[self.rank]
        return torch.tensor([slot.data_ptr() - own.data_ptr() for slot in slots], device=own.device)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """On the current stream of a GPU, after what was done before on any other."""
        stream = torch.cuda.current_stream(self._buffers[self.rank].device)
        if self._last is not None and self._last[0] != stream:
            stream.wait_event(self._last[1])
        yield
        event = torch.cuda.Event() if self._last is None else self._last[1]
        event.record(stream)
        self._last = stream, event


def slot_blocks(num_bytes: int, world: int) -> int:
    """Blocks of a slot in a buffer of so many bytes."""
    return num_bytes // (2 * world * _BLOCK_BYTES)


def num_bytes_for(numel: int, world: int) -> int:
    """Of a buffer in which so many elements, those of all ranks' pieces, travel together or a power of two more."""
    numel = min(max(1 << max(numel - 1, 0).bit_length(), MIN_NUMEL), MAX_NUMEL)
    num_blocks = -(-numel // (BLOCK * world * _ALIGNED_BLOCKS)) * _ALIGNED_BLOCKS
    return 2 * world * num_blocks * _BLOCK_BYTES


# what each group has, or why it has nothing
_kept: weakref.WeakKeyDictionary[Any, Workspace | str] = weakref.WeakKeyDictionary()


def workspace_of(group: Any, device: torch.device, numel: int) -> Workspace | str:
    """What the ranks of a group share, made at the first call and when more elements come; all of them must ask.

    Args:
        group: a process group; None for all ranks.
        device: this rank's GPU.
        numel: elements that are to travel, the same on all ranks.
    Returns:
        The workspace, which may take fewer elements at once; or why there is none, the same for the group's life.
    """
    group = dist.group.WORLD if group is None else group
    kept = _kept.get(group)
    world = dist.get_world_size(group)
    num_bytes = num_bytes_for(numel, world)
    if isinstance(kept, str):
        return kept
    if kept is not None and (kept.is_largest or kept.num_blocks >= slot_blocks(num_bytes, world)):
        return kept
    obstacle = obstacle_to_sharing(group, device) if kept is None else None
    if obstacle is not None:
        logger.info("FP8 all-reduces use the process group's collectives: %s", obstacle)
        _kept[group] = obstacle
        return obstacle
    shared = share(group, device, num_bytes)
    made = shared if isinstance(shared, str) else Workspace(shared)
    if isinstance(made, Workspace):
        logger.info("FP8 all-reduces go through the memory of %d GPUs, %.0f MiB on each", world, num_bytes / 2**20)
    elif kept is None:
        logger.warning("FP8 all-reduces use the process group's collectives: %s", made)
    else:
        logger.warning("FP8 all-reduces go on in shorter messages: %s", made)
        kept.is_largest, made = True, kept
    _kept[group] = made
    return made


def obstacle_to_sharing(group: Any, device: torch.device) -> str | None:
    """Why these ranks cannot share memory, as far as can be told without trying; the same on all of them."""
    world = dist.get_world_size(group)
    if not 2 <= world <= MAX_RANKS:
        return f"it is for 2 to {MAX_RANKS} ranks, and there are {world}"
    own = None
    if env.force_reference():
        own = "OCTAVO_FORCE_REFERENCE is set"
    elif "cuda:nccl" not in (backend := dist.get_backend_config(group)):
        own = f"the process group's backend is {backend}, not NCCL"
    elif _job is not None and _job() is not dist.group.WORLD:
        own = "a rank shared memory in an earlier job, and torch counts on from there, where new processes begin at 0"
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    place = f"{socket.gethostname()} {boot}", device.index, own
    places = together(group, lambda: place)
    if said := [each for *_, each in places if each is not None]:
        return str(said[0])
    if len({host for host, *_ in places}) > 1:
        return "the ranks are on several hosts"
    indices = [index for _, index, _ in places]
    if len(set(indices)) < world:
        return "each rank must see all GPUs, and have one of its own: two say that theirs has the same number"
    lacking = [i for i in indices if i != device.index and not torch.cuda.can_device_access_peer(device.index, i)]
    own = f"GPU {device.index} cannot reach the memory of GPU {lacking[0]}" if lacking else None
    return next((each for each in together(group, lambda: own) if each is not None), None)


_shared: list[weakref.ref[torch.Tensor]] = []
_job: weakref.ref[Any] | None = None  # all ranks of that in which this process first shared memory


def shared_bytes() -> int:
    """Of this rank's buffers in use, which torch's allocator does not count."""
    return sum(buffer.nbytes for ref in _shared if (buffer := ref()) is not None)


def share(group: Any, device: torch.device, num_bytes: int) -> Shared | str:
    """New buffers of so many bytes on every rank, or on none and why. A collective, for ranks without an obstacle."""
    try:
        # each before the next one, in which the others would wait
        buffer = all_do(group, lambda: _allocate(num_bytes, device))
        shared = all_do(group, lambda: _meet(group, buffer))
    except RuntimeError as error:  # another torch, no memory, no way to a peer
        return str(error)
    _shared[:] = [ref for ref in _shared if ref() is not None]
    _shared.append(weakref.ref(shared.buffers[shared.rank]))
    return shared


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    if torch.cuda.mem_get_info(device)[0] < 2 * num_bytes:
        torch.cuda.empty_cache()  # what torch's allocator keeps is not this one's
    return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def _meet(group: Any, buffer: torch.Tensor) -> Shared:
    from torch._C._distributed_c10d import _SymmetricMemory

    global _job
    _job = _job or weakref.ref(dist.group.WORLD)
    handle = _SymmetricMemory.rendezvous(buffer, group.group_name)
    buffers = [handle.get_buffer(rank, buffer.shape, torch.uint8) for rank in range(handle.world_size)]
    if buffers[handle.rank].data_ptr() != buffer.data_ptr():
        raise RuntimeError("torch gives another address for this rank's buffer than it has")
    timeout_ms = round(group._get_backend(buffer.device).options._timeout.total_seconds() * 1e3)
    return Shared(buffers, handle.rank, lambda: handle.barrier(channel=0, timeout_ms=timeout_ms))
