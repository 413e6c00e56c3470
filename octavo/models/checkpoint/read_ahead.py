"""Reading what comes next while what was read is worked on."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")

NUM_READS = 4  # at a time, each of which shares its reader's threads
MAX_BYTES_AHEAD = 1 << 30
MAX_SHARE_AHEAD = 1 / 8  # of all bytes: what becomes codes takes half, and loading shall not take more than all


def read_ahead(reads: Sequence[tuple[int, Callable[[], T]]], device: torch.device | str) -> Generator[T, None, None]:
    """What each of these reads returns, in their order; later ones begin before the caller takes an earlier one.

    What a read raises is raised when its turn comes; those that have begun are waited for, others do not begin. What
    the caller has not come back for takes no more than MAX_BYTES_AHEAD and MAX_SHARE_AHEAD, or is a single read.

    Args:
        reads: bytes that a read leaves on the device, and the read, which a thread calls under the caller's stream.
        device: where to.
    """
    place, max_bytes = torch.device(device), min(MAX_BYTES_AHEAD, MAX_SHARE_AHEAD * sum(size for size, _ in reads))
    stream = torch.cuda.current_stream(place) if place.type == "cuda" else None
    pool = ThreadPoolExecutor(NUM_READS, thread_name_prefix="octavo-read-ahead")
    under_way: deque[tuple[int, Future[T]]] = deque()
    num_bytes, rest = 0, deque(reads)
    try:
        while rest or under_way:
            while rest and (not under_way or num_bytes + rest[0][0] <= max_bytes):
                size, read = rest.popleft()
                under_way.append((size, pool.submit(_under, stream, read)))
                num_bytes += size
            size, done = under_way[0]
            yield done.result()
            under_way.popleft()
            num_bytes -= size
    finally:
        pool.shutdown(cancel_futures=True)


def _under(stream: Any, read: Callable[[], T]) -> T:
    context: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
    with context:
        return read()
