"""A pool of zero-initialised scratch for amaxes, without a launch for each: pieces of a slab zeroed as a whole.

A number is handed out once, so nothing is ever zeroed again. A slab belongs to one stream: what is taken from it is
zero by the time that a kernel of that stream runs, and the memory is not used again before those kernels are done.
"""

import threading

import torch

SLAB_NUMBERS = 1 << 18  # 1 MiB: a scale a row of 8192 tokens takes a twentieth, a scale a tensor next to nothing
MOST_TAKEN = SLAB_NUMBERS // 8  # a larger piece is zeroed by itself
_LINE = 32  # numbers in 128 bytes: no two pieces share a line of the cache, and every one is aligned
_MOST_SLABS = 16


class _Slab:
    """A slab and how many of its numbers are taken."""

    __slots__ = ("address", "taken", "tensor")

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(SLAB_NUMBERS, dtype=torch.int32, device=device)
        self.address, self.taken = self.tensor.data_ptr(), 0


_slabs: dict[tuple[torch.device, int], _Slab] = {}  # by device and stream, the newest last
_lock = threading.Lock()


def alloc_zeros(num: int, device: torch.device, stream: int) -> tuple[int, torch.Tensor]:
    """Allocate `num` zeros, at most MOST_TAKEN, for kernels of this stream, which is the device's current one.

    Not while a CUDA graph is captured: its replays would find what the first one left.

    Returns:
        (address of the int32 numbers, the slab: to be held until the last kernel that takes the address is launched).
    """
    with _lock:
        slab = _slabs.get((device, stream))
        if slab is None or slab.taken + num > SLAB_NUMBERS:
            slab = _renew(device, stream)
        first = slab.taken
        slab.taken = first + (num + _LINE - 1) // _LINE * _LINE
        return slab.address + 4 * first, slab.tensor


def _renew(device: torch.device, stream: int) -> _Slab:
    """A new slab of the stream, and no more than _MOST_SLABS of them all."""
    _slabs.pop((device, stream), None)
    if len(_slabs) >= _MOST_SLABS:
        del _slabs[next(iter(_slabs))]
    slab = _slabs[device, stream] = _Slab(device)
    return slab
