"""Copies of a job's tensors in this host's memory, which can be written while training changes the originals."""

import contextlib
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from octavo.distributed.shards import is_distributed, local

_ALIGNMENT = 64
_LARGE_BYTES = 1 << 20  # pieces that are worth a copy beside training
_Key = tuple[int, tuple[int, ...], torch.dtype]


class HostCopies:
    """Memory for one set of copies, taken at the first and kept: page-locked where tensors are on a GPU.

    Of a DTensor this rank's shard alone is copied. Tensors that share their memory are copied once.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None  # once the large pieces of the last copy are

    def reserve(self, *mappings: Mapping[str, torch.Tensor]) -> None:
        """Take the memory that `copy` of the same tensors needs: page-locking takes seconds for tens of GB."""
        parts = _distinct(mappings).values()
        num_bytes = sum(_aligned(part.nbytes) for part in parts)
        if num_bytes > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back before the larger one is taken
            # written to, so that the first copy does not wait for its pages
            self._memory = torch.empty(num_bytes, dtype=torch.uint8).fill_(0)
            device = next((part.device for part in parts if part.is_cuda), None)
            if device is not None:
                with torch.cuda.device(device):  # a thread's own is the first one, where CUDA would make a context
                    _lock_pages(self._memory)

    @torch.no_grad()
    def copy(
        self,
        *mappings: Mapping[str, torch.Tensor],
        is_open: bool = False,
        at_once: Mapping[str, torch.Tensor] | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        """The tensors as they are now; the copies before these are overwritten.

        Args:
            is_open: return while pieces of 1 MiB and more are still copied from a GPU. Until `hold_writes` was called
                they may not be changed, and until `wait` has returned the copies may not be read.
            at_once: those of the tensors that are copied before it returns all the same.
        Returns:
            For each mapping its names, with tensors on the CPU: DTensors of the same mesh and placements, plain ones.
        """
        self.reserve(*mappings)
        copies, begin = {}, 0
        parts, large = _distinct(mappings), []
        closed = set(_distinct((at_once or {},)))
        for key, part in parts.items():
            # by way of numpy a piece is a storage of its own: torch.save would copy a view of a larger one, and keep it
            room = torch.from_numpy(self._memory.numpy()[begin : begin + part.nbytes])
            copies[key] = room.view(part.dtype).view(part.shape)
            if is_open and part.is_cuda and part.nbytes >= _LARGE_BYTES and key not in closed:
                large.append((copies[key], part))
            else:
                copies[key].copy_(part, non_blocking=True)
            begin += _aligned(part.nbytes)
        for device in {part.device for part in parts.values() if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        if large:
            self._copy_beside(large)
        return [{name: _as(tensor, copies[_key(tensor)]) for name, tensor in tensors.items()} for tensors in mappings]

    def _copy_beside(self, pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy (to, from) on a stream of their own; what wrote them is done."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(pieces[0][1].device)
        with torch.cuda.stream(self._stream):
            for room, part in pieces:
                room.copy_(part, non_blocking=True)
                part.record_stream(self._stream)  # it may be freed meanwhile
        self._copied = self._stream.record_event()

    def hold_writes(self) -> None:
        """Let what the current stream is given from now on wait for copies that are under way; the host does not."""
        if self._copied is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def wait(self) -> None:
        """Return when the copies are made; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()


def _distinct(mappings: tuple[Mapping[str, torch.Tensor], ...]) -> dict[_Key, torch.Tensor]:
    """What lies on this rank of all tensors, each piece of memory once."""
    return {_key(tensor): local(tensor) for tensors in mappings for tensor in tensors.values()}


def _key(tensor: torch.Tensor) -> _Key:
    part = local(tensor)
    return (part.data_ptr(), tuple(part.shape), part.dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _as(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """A shard's copy in the place of the shard."""
    if not is_distributed(tensor):
        return part
    from torch.distributed.tensor import DTensor

    # from_local would move it to the mesh's device
    return DTensor(part, tensor._spec, requires_grad=False)


def _lock_pages(memory: torch.Tensor) -> None:
    """Page-lock memory that exists: torch's own allocator would round it up to a power of two."""
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        warnings.warn(
            f"{memory.numel() / 1e9:.1f} GB of memory for saves in the background could not be page-locked (CUDA error "
            f"{code}); training stands still longer at a save; see ulimit -l",
            stacklevel=2,
        )
        with contextlib.suppress(RuntimeError):  # takes the error, which the next kernel would report as its own
            torch.ones(1, device="cuda")
        return
    weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
