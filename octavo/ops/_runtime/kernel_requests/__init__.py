"""Kernels that steps ask for, named in place of being compiled."""

import threading

_own = threading.local()


def leaves_out_launches() -> bool:
    """Whether this thread runs steps without some of their kernels: what it computes then says nothing."""
    return getattr(_own, "leaves_out", False)


def leave_out_launches(is_so: bool) -> None:
    """Say whether this thread does."""
    _own.leaves_out = is_so
