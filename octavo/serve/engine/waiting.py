"""Whether a computation waits for the GPU, found before it is captured in a CUDA graph, which cannot hold that."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.ops._runtime.registry import implementation_of

_ATEN = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_PUTS = (_ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)
_OPS_THAT_WAIT = (
    *(_ATEN._local_scalar_dense, _ATEN.equal, _ATEN.is_nonzero, _ATEN.allclose, _ATEN.nonzero, _ATEN.masked_select),
    *(_ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive, _ATEN.bincount, _ATEN.histc, _ATEN.multinomial),
)


def try_out(run: Callable[[], object]) -> None:
    """Run what is to be captured, outside of a graph: it compiles, loads and checks what it does once.

    Raises:
        RuntimeError: it waits for the device, each time.
    """
    try:
        with NoWaiting():
            run()
    except RuntimeError:
        run()  # what was waited for may have been a check that is made once
        with NoWaiting():
            run()


class NoWaiting(TorchDispatchMode):
    """Within, what this thread would wait for a GPU with raises RuntimeError: a capture would fail on it, for good.

    torch's own check (set_sync_debug_mode) is the process's: it would stop a learner that waits in another thread.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks: to skip its compiler it would import it at the first operation, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func.overloadpacket, args, kwargs):
            raise RuntimeError(f"{func} waits for the GPU")
        ours = implementation_of(func, args[0]) if args else None
        with self:  # which torch has turned off here; what an op is made of goes through it, too
            made = _take_apart(func, args, kwargs) if ours is None else ours(*args, **kwargs)
        return func(*args, **kwargs) if made is NotImplemented else made


def _take_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation returns that is made of others; else NotImplemented.

    As decompose, which prefers torch's Python versions: that of matmul imports sympy, which takes a second.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    return func.decompose(*args, **kwargs)


def _waits(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation ends with what only the device knows, or with a copy that does not go by itself."""
    if not (args and isinstance(args[0], torch.Tensor)):
        return False
    if op in (_ATEN._to_copy, _ATEN.copy_):
        moved: torch.Tensor = args[1] if op is _ATEN.copy_ else args[0]
        to = args[0].device if op is _ATEN.copy_ else torch.device(kwargs.get("device") or moved.device)
        is_free = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return to.type != moved.device.type and not is_free
    if args[0].device.type == "cpu":
        return False
    if op is _ATEN.index or op in _PUTS:
        is_fill = op in _PUTS and args[2].numel() == 1 and not any(args[3:4])  # whatever the mask, no place is counted
        masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return (masks and not is_fill) or any(x is not None and x.device != args[0].device for x in args[1])
    if op is _ATEN.repeat_interleave:
        return isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None
    return op in _OPS_THAT_WAIT
