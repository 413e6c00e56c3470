"""Bytes of files read by several threads at once, straight to where they are wanted: one thread is slower than a disk's
cache, and far slower than the way to a GPU."""

import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

_NUM_THREADS = 8
CHUNK_BYTES = 16 << 20  # of one read; a thread that reads for a GPU keeps as much pinned memory


class ParallelReader:
    """Opens each file once; close() gives files, threads and memory back, and so does the garbage collector.

    Several threads may read at once.

    Args:
        chunk_bytes: of one read.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._files: dict[Path, int] = {}  # descriptors
        weakref.finalize(self, _close, self._files)
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()  # a thread's pinned memory, and when its last copy is done
        self._opening = threading.Lock()

    def read(self, file: Path, start: int, out: torch.Tensor, stride: int = 1) -> None:
        """Fill out with the bytes of a file from start on.

        Args:
            out: [N] uint8, contiguous, on a CPU or a GPU; there the current stream's work comes after the copies. Or
                [n, m] with a stride, m at most chunk_bytes.
            stride: bytes of the file from one of out's rows to the next; those between them are not read.
        Raises:
            OSError: the file cannot be read, or ends before that.
        """
        with self._opening:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY)
            descriptor = self._files[file]
        stream = torch.cuda.current_stream(out.device) if out.is_cuda else None
        num = self._chunk_bytes if out.dim() == 1 else self._chunk_bytes // out.shape[1]
        parts = [(start + first * stride, out[first : first + num], stride) for first in range(0, len(out), num)]
        if len(parts) == 1:
            self._read_part(descriptor, *parts[0], stream)
            return
        with self._opening:
            if self._pool is None and parts:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="octavo-read")
        under_way: list[Future[None]] = [
            self._pool.submit(self._read_part, descriptor, *part, stream)  # type: ignore[union-attr]
            for part in parts
        ]
        for done in under_way:
            done.result()

    def close(self) -> None:
        """Give files, threads and memory back; a later read opens them again."""
        if self._pool is not None:
            self._pool.shutdown()
        _close(self._files)
        self._pool, self._own = None, threading.local()

    def _read_part(
        self, descriptor: int, start: int, out: torch.Tensor, stride: int, stream: "torch.cuda.Stream | None"
    ) -> None:
        if stream is None:
            _fill(descriptor, start, out, stride)
            return
        own = self._own
        if not hasattr(own, "pinned"):
            own.pinned = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True)
            own.copied = torch.cuda.Event()
        own.copied.synchronize()
        pinned = own.pinned[: out.numel()].view(out.shape)
        _fill(descriptor, start, pinned, stride)
        with torch.cuda.stream(stream):
            out.copy_(pinned, non_blocking=True)
            own.copied.record()


def _close(files: dict[Path, int]) -> None:
    """Close descriptors and forget them."""
    while files:
        os.close(files.popitem()[1])


def _fill(descriptor: int, start: int, out: torch.Tensor, stride: int) -> None:
    """Fill a CPU's uint8 tensor from a place in a file, or each of its rows from a place of its own."""
    memory = memoryview(out.view(-1).numpy())  # type: ignore[arg-type]
    if out.dim() == 1:
        _fill_run(descriptor, start, memory)
        return
    for row in range(len(out)):
        _fill_run(descriptor, start + row * stride, memory[row * out.shape[1] : (row + 1) * out.shape[1]])


def _fill_run(descriptor: int, start: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], start + done)
        if not count:
            raise OSError(f"the file ends at byte {start + done}, {len(memory) - done} bytes early")
        done += count
