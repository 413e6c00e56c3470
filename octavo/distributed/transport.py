"""Collectives that carry FP8: blocks of 128 elements travel as E4M3 codes and fp32 scales in one uint8 buffer.

Values go in and come out in bf16 or fp32. Sums are made in fp32, in the order of the ranks. Every function takes a
process group and makes none; on a GPU all work is in the order of the current stream, as NCCL's own is.
"""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from octavo.distributed.collectives import all_gather_into
from octavo.distributed.packed import Packed, num_blocks
from octavo.errors import BackendError, ConfigError, DtypeError, ShapeError
from octavo.ops.packed import decode_pieces_, quantize_pieces_

DTYPES = (torch.float32, torch.bfloat16)


class Pending:
    """A collective under way.

    Args:
        work: of torch.distributed.
        finish: makes the result of what has arrived.
    """

    def __init__(self, work: Any, finish: Callable[[], torch.Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> torch.Tensor:
        """The result; on a GPU the current stream waits, not the CPU."""
        self._work.wait()
        with torch.no_grad():
            return self._finish()


@overload
def all_gather_q(x: torch.Tensor, group: Any = None, *, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def all_gather_q(x: torch.Tensor, group: Any = None, *, async_op: Literal[True]) -> Pending: ...
@torch.no_grad()
def all_gather_q(x: torch.Tensor, group: Any = None, *, async_op: bool = False) -> torch.Tensor | Pending:
    """Every rank's tensor, quantized once by its rank: the same bits on all of them, the sender too.

    Args:
        x: any shape, the same on all ranks, fp32 or bf16.
        group: a process group; None for all ranks.
        async_op: return a Pending instead of the result.
    Returns:
        [ranks, *x.shape], x's dtype. A block of 128 that holds NaN or an infinity is NaN.
    Raises:
        DtypeError: x is neither fp32 nor bf16.
        BackendError: there is no process group.
        ConfigError: this rank is not in the group.
    Exactness: bitwise QuantizedTensor.dequantize of the contract's block_1x128 on CPU and GPU.
    """
    world, _ = check_group(group)
    check_dtype(x)
    sent = _packed(x.reshape(1, -1))
    received = sent.empty_like(world)
    work = all_gather_into(received.buffer, sent.buffer, group=group, async_op=async_op)

    def finish() -> torch.Tensor:
        return _decoded(received, x.new_empty(world, x.numel())).view(world, *x.shape)

    return Pending(work, finish) if async_op else finish()


@overload
def all_to_all_q(x: torch.Tensor, group: Any = None, *, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def all_to_all_q(x: torch.Tensor, group: Any = None, *, async_op: Literal[True]) -> Pending: ...
def all_to_all_q(x: torch.Tensor, group: Any = None, *, async_op: bool = False) -> torch.Tensor | Pending:
    """Piece i of every rank goes to rank i.

    Args:
        x: [ranks, ...] fp32 or bf16, the same shape on all ranks.
        group: as in all_gather_q.
        async_op: as in all_gather_q.
    Returns:
        x's shape and dtype: the piece that each rank sent to this one.
    Raises:
        ShapeError: x has not one piece a rank.
    Other errors and exactness as all_gather_q.
    """

    def finish(received: Packed) -> torch.Tensor:
        return _decoded(received, x.new_empty(len(x), x[0].numel())).view(x.shape)

    return _exchange(x, group, finish, async_op)


@overload
def reduce_scatter_q(x: torch.Tensor, group: Any = None, *, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def reduce_scatter_q(x: torch.Tensor, group: Any = None, *, async_op: Literal[True]) -> Pending: ...
def reduce_scatter_q(x: torch.Tensor, group: Any = None, *, async_op: bool = False) -> torch.Tensor | Pending:
    """The sum over the ranks of this rank's piece: each quantizes its part once, the sum is made in fp32.

    Args:
        x: as in all_to_all_q.
        group: as in all_gather_q.
        async_op: as in all_gather_q.
    Returns:
        [...], x's shape without the first dimension and its dtype, rounded once.
    Errors as all_to_all_q.
    Exactness: bitwise: decoded values, added in the order of the ranks.
    """

    def finish(received: Packed) -> torch.Tensor:
        return _decoded(received, x.new_empty(1, x[0].numel())).view(x.shape[1:])

    return _exchange(x, group, finish, async_op)


def start_exchange(sent: Packed, group: Any) -> tuple[Any, Packed]:
    """Send piece i to rank i: the work, and the pieces that will have come, in the order of the ranks."""
    received = sent.empty_like(len(sent.buffer))
    return dist.all_to_all_single(received.buffer, sent.buffer, group=group, async_op=True), received


def check_group(group: Any) -> tuple[int, int]:
    """(ranks of the group, this one among them).

    Raises:
        BackendError: there is no process group.
        ConfigError: this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise BackendError(
            "an FP8 collective needs a process group, and there is none; start with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            f"only members of a group may call its collectives, and rank {dist.get_rank()} is in none of it; "
            "pass the group that this rank is in"
        )
    return dist.get_world_size(group), rank


def check_dtype(x: torch.Tensor) -> None:
    """Refuse what does not travel.

    Raises:
        DtypeError: x is neither fp32 nor bf16.
    """
    if x.dtype not in DTYPES:
        raise DtypeError(f"FP8 collectives take float32 or bfloat16, got {x.dtype}; cast it, or send it as it is")


def _packed(pieces: torch.Tensor) -> Packed:
    packed = Packed.empty(len(pieces), num_blocks(pieces.shape[1]), pieces.device)
    quantize_pieces_(pieces, packed.codes, packed.scales)
    return packed


def _decoded(packed: Packed, out: torch.Tensor) -> torch.Tensor:
    decode_pieces_(packed.codes, packed.scales, out)
    return out


@torch.no_grad()
def _exchange(
    x: torch.Tensor, group: Any, finish: Callable[[Packed], torch.Tensor], async_op: bool
) -> torch.Tensor | Pending:
    world, _ = check_group(group)
    check_dtype(x)
    if x.dim() == 0 or len(x) != world:
        raise ShapeError(f"x must have a piece for each of {world} ranks, [{world}, ...], got {tuple(x.shape)}")
    work, received = start_exchange(_packed(x.reshape(world, -1)), group)
    pending = Pending(work, lambda: finish(received))
    return pending if async_op else pending.wait()
