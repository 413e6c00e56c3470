"""Kernels that steps ask for, named in place of being compiled."""

import contextlib
import threading
from collections.abc import Iterator

_own = threading.local()


def leaves_out_launches() -> bool:
    """Whether this thread runs steps without some of their kernels: what it computes then says nothing."""
    return getattr(_own, "leaves_out", False)


@contextlib.contextmanager
def leaving_out_launches() -> Iterator[None]:
    """Mark this thread as one that does."""
    _own.leaves_out = True
    try:
        yield
    finally:
        _own.leaves_out = False
