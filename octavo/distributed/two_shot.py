"""All-reduce in FP8, in two shots: quantize, all-to-all, sum in fp32, quantize, all-gather.

GPUs of one host write and read each other's memory (symmetric.py); else the process group's collectives carry the
codes. What is long is cut. Neither changes a bit.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import pad

from octavo.distributed import symmetric
from octavo.distributed.collectives import all_gather_into
from octavo.distributed.packed import Packed, num_blocks
from octavo.distributed.transport import check_dtype, check_group, start_exchange
from octavo.errors import BackendError, ShapeError
from octavo.ops.packed import BLOCK, decode_pieces_, kernels, quantize_pieces_, requantize_pieces_

MESSAGE_NUMEL = 128 << 20  # elements that a collective carries at most; on two GPUs fewer are slower

Transport = Literal["nccl", "symmetric"] | None


class Part(NamedTuple):
    """Views of what is reduced, each [ranks, n]: rank i owns row i."""

    values: torch.Tensor
    result: torch.Tensor
    residual: torch.Tensor | None


def all_reduce_q(
    x: torch.Tensor,
    group: Any = None,
    *,
    average: bool = False,
    residual: torch.Tensor | None = None,
    transport: Transport = None,
) -> torch.Tensor:
    """The sum or the mean over the ranks, quantized 1x128 by each rank, and again by who owns the sum.

    With a residual (error feedback) what this rank's first quantization loses is kept and added to its next x; so is
    what the second one loses, by the rank that owns the piece. A block that is NaN on this rank keeps none.

    GPUs of one host, up to 8, that reach each other's memory exchange codes there: a buffer of each group takes 2.06
    bytes an element of the longest x, 33 MiB at least and 528 at most. All ranks agree on it in the first call of a
    group, and when it grows. A rank that waits there for another longer than the group's timeout ends with a CUDA
    error at its next synchronization.

    Args:
        x: any shape, fp32 or bf16, the same shape on all ranks.
        group: a process group; None for all ranks.
        average: divide the sum by the number of ranks, before it is quantized.
        residual: x's shape, fp32 or bf16, zeros at first; changed in place.
        transport: "nccl", the process group's collectives; "symmetric", memory; None for memory where it serves.
    Returns:
        x's shape and dtype; the same bits on every rank. A block of 128 in which any rank holds NaN or an infinity,
        or whose sum is too large for fp32, is NaN.
    Raises:
        ShapeError: the residual has another shape.
        DtypeError: x is neither fp32 nor bf16.
        BackendError: there is no process group, or no symmetric memory where it is asked for.
        ConfigError: this rank is not in the group.
    Exactness: bitwise on CPU and GPU, whatever the transport. On normal data 28 dB and more against the fp32 sum.
    """
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    _all_reduce([x], [result], group, average, None if residual is None else [residual], transport)
    return result


def all_reduce_q_(
    tensors: Sequence[torch.Tensor],
    group: Any = None,
    *,
    average: bool = False,
    residuals: Sequence[torch.Tensor] | None = None,
    transport: Transport = None,
) -> None:
    """all_reduce_q of each tensor, in place and in few messages; each has the bits that it would have alone.

    Args:
        tensors: contiguous; as all_reduce_q's x.
        group: as in all_reduce_q.
        average: as in all_reduce_q.
        residuals: one for each tensor.
        transport: as in all_reduce_q.
    Errors and exactness as all_reduce_q.
    """
    _all_reduce(tensors, tensors, group, average, residuals, transport)


@torch.no_grad()
def _all_reduce(
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    group: Any,
    average: bool,
    residuals: Sequence[torch.Tensor] | None,
    transport: Transport,
) -> None:
    world, rank = check_group(group)
    parts = []
    for index, x in enumerate(tensors):
        check_dtype(x)
        residual = None if residuals is None else residuals[index]
        if residual is not None and residual.shape != x.shape:
            raise ShapeError(f"the residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
        kept = None if residual is None else _by_owner(residual, world)
        parts.append(Part(_by_owner(x, world), _by_owner(results[index], world), kept))
    workspace = _workspace(parts, group, transport)
    if workspace is None:
        _reduce_by_collectives(parts, group, average, world, rank)
    else:
        with workspace.in_order():
            for _ in steps_in_memory(parts, workspace, average):
                workspace.barrier()
    for index, part in enumerate(parts):
        _put_back(part.result, results[index])
        if residuals is not None and part.residual is not None:
            _put_back(part.residual, residuals[index])


def _workspace(parts: list[Part], group: Any, transport: Transport) -> symmetric.Workspace | None:
    """Memory to exchange codes in; None for collectives."""
    found: symmetric.Workspace | str = "the tensors are not on GPUs"
    if transport != "nccl" and parts and parts[0].values.is_cuda:
        numel = sum(part.values.numel() for part in parts)
        found = symmetric.workspace_of(group, parts[0].values.device, numel)
    if not isinstance(found, str):
        return found
    if transport == "symmetric":
        raise BackendError(f"there is no symmetric memory: {found}; leave transport at None")
    return None


def steps_in_memory(parts: list[Part], workspace: symmetric.Workspace, average: bool) -> Iterator[None]:
    """Reduce parts; at each yield the ranks wait for each other."""
    run, rank = kernels(), workspace.rank
    first, second = workspace.shots
    for message in _messages(parts, workspace.num_blocks * BLOCK):
        widths = [part.values.shape[1] for part in message]
        slot = workspace.first_slot(sum(map(num_blocks, widths)))
        pieces = list(zip(message, slot.split(widths), strict=True))
        for part, (codes, scales) in pieces:
            run.quantize_pieces(part.values, codes, scales, part.residual, first.write, rank + 1)
        yield
        for part, (codes, scales) in pieces:
            residual = None if part.residual is None else part.residual[rank : rank + 1]
            run.requantize_pieces(codes, scales, codes, scales, average, residual, first.read, second.write)
        yield
        for part, (codes, scales) in pieces:
            run.decode_pieces(codes, scales, part.result, second.read, rank + 1)


def _reduce_by_collectives(parts: list[Part], group: Any, average: bool, world: int, rank: int) -> None:
    first, second = [], []
    for message in _messages(parts, MESSAGE_NUMEL // (BLOCK * world) * BLOCK):
        widths = [part.values.shape[1] for part in message]
        sent = Packed.empty(world, sum(map(num_blocks, widths)), message[0].values.device)
        for part, (codes, scales) in zip(message, sent.split(widths), strict=True):
            quantize_pieces_(part.values, codes, scales, part.residual)
        first.append((message, widths, *start_exchange(sent, group)))
    for message, widths, work, received in first:
        work.wait()
        owned, everyones = received.empty_like(1), received.empty_like(world)
        for part, came, own in zip(message, received.split(widths), owned.split(widths), strict=True):
            residual = None if part.residual is None else part.residual[rank : rank + 1]
            requantize_pieces_(*came, *own, average=average, residual=residual)
        work = all_gather_into(everyones.buffer, owned.buffer, group=group, async_op=True)
        second.append((message, widths, work, everyones))
    for message, widths, work, everyones in second:
        work.wait()
        for part, came in zip(message, everyones.split(widths), strict=True):
            decode_pieces_(*came, part.result)


def _messages(parts: list[Part], width: int) -> Iterator[list[Part]]:
    """Parts, cut at multiples of a block, that travel together: up to `width` columns, one block at least."""
    width, message, left = max(width, BLOCK), [], max(width, BLOCK)
    for part in parts:
        begin, end = 0, part.values.shape[1]
        while begin < end:
            at = slice(begin, min(begin + left, end))
            message.append(Part(*(None if view is None else view[:, at] for view in part)))  # type: ignore[arg-type]
            left -= at.stop - begin
            begin = at.stop
            if left == 0:
                yield message
                message, left = [], width
    if message:
        yield message


def _by_owner(x: torch.Tensor, world: int) -> torch.Tensor:
    """[ranks, n], n a multiple of 128: a view, or a copy with zeros behind it."""
    flat = x.contiguous().view(-1)
    missing = -flat.numel() % (BLOCK * world)
    return (pad(flat, (0, missing)) if missing else flat).view(world, -1)


def _put_back(source: torch.Tensor, target: torch.Tensor) -> None:
    """_by_owner undone, where it made a copy."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source.view(-1)[: target.numel()].view(target.shape))
