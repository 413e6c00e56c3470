"""torch's writer of a rank's shards, which says what the disk said; imported late, for it takes torch a while."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter


class ShardWriter(FileSystemWriter):
    """FileSystemWriter into a new folder; a disk that refuses a write is an OSError.

    Args:
        has_gpu_tensors: else no stream of a GPU is asked for, which in a thread would be the first GPU's on every rank.
    """

    def __init__(self, folder: Path, *, has_gpu_tensors: bool) -> None:
        super().__init__(folder)
        if not has_gpu_tensors:
            self.per_thread_copy_ahead = 0
        self.fs = _FileSystem()


class _FileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        stream = _Stream()
        try:
            with super().create_stream(path, mode) as stream.file:
                yield stream
        except RuntimeError:
            if stream.refused is None:
                raise
            raise stream.refused from None


class _Stream:
    """A file that remembers what a write met: torch's zip writer reports another error in its place."""

    file: Any

    def __init__(self) -> None:
        self.refused: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return int(self.file.write(data))
        except OSError as error:
            self.refused = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
