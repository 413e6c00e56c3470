"""What a disk refuses, as one error that says where and what to do; and checks of a folder before work goes into it."""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from octavo.errors import StorageError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IN_THE_WAY = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_TRIAL_BYTES = 4096  # a block, which a full disk refuses


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn what the disk refuses within the block into a StorageError about `target`, the outermost of nested ones."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = errno_of(error)
        if number is None:
            raise
        raise storage_error(target, number, getattr(error, "filename", None)) from error


def storage_error(target: Path | str, number: int, file: object = None) -> StorageError:
    """The error of a path that cannot be written.

    Args:
        number: errno.
        file: where it happened, if that is known.
    """
    if number in _NO_ROOM:
        remedy = "free some space, or choose a path on another disk"
    elif number in _IN_THE_WAY:
        remedy = "a file stands where a folder is wanted; move it, or choose another path"
    else:
        remedy = "choose a path that can be written to"
    where = "" if file is None or str(file) == str(target) else f" ({file})"
    return StorageError(number, f"{target} cannot be written: {os.strerror(number)}{where}; {remedy}")


def check_writable(directory: Path, key: str, num_bytes: int = 0) -> None:
    """Refuse a folder that cannot be made or written into; nothing is left behind.

    Args:
        directory: may be missing; the nearest folder above it that is there is then tried.
        key: what it is called, for the message.
        num_bytes: that will be written at least.
    Raises:
        StorageError: it cannot be written into, or has too little space left.
    """
    present = directory.absolute()
    while not os.path.lexists(present) and present != present.parent:
        present = present.parent
    with writing(Path(f"{key} = {directory}")):
        # not TemporaryFile, which hides errno where a file system has no unnamed files
        descriptor, name = tempfile.mkstemp(prefix=".octavo-", dir=present)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                if file.write(bytes(_TRIAL_BYTES)) != _TRIAL_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.unlink(name)
    free = shutil.disk_usage(present).free
    if free < num_bytes:
        raise StorageError(
            errno.ENOSPC,
            f"{key} = {directory} has {free / 1e6:,.1f} MB left, and a checkpoint takes at least "
            f"{num_bytes / 1e6:,.1f} MB; free some space, or choose a path on another disk",
        )


def errno_of(error: BaseException) -> int | None:
    """The errno of an OSError, or that safetensors' writer tells in words; None of any other error."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None
