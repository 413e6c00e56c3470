"""The ranks that hold slices of each linear (tensor parallelism), and what travels between them.

Pieces are neighbouring columns, in the order of the ranks. What moves values is differentiable: its backward is the
transposed movement. Codes travel without gradients.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from octavo.distributed.collectives import all_gather_into, by_owner, exchange, reduce_scatter_into, side_by_side
from octavo.distributed.one_shot import OneShot, one_shot_of
from octavo.distributed.outcome import together
from octavo.distributed.pushes import Pushes, pushes_of
from octavo.numerics.quantized import QuantizedTensor
from octavo.ops.moe import ExpertRows
from octavo.ops.one_shot import Places, reference
from octavo.ops.push.reference import rows_each, share_of

T = TypeVar("T", torch.Tensor, torch.Tensor | None)

# Of parts this large each rank goes on with a share of the rows: half the bytes, and less to compute. Of so many rows.
MIN_DEALT_BYTES = 4 << 20
MIN_DEALT_ROWS = 64


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """The ranks among which every linear of a model is cut.

    Attributes:
        group: torch's process group; None where the ranks have not met.
        rank: this one among them.
        size: how many there are.
    """

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any = None) -> "TensorGroup":
        """Of a process group; None for all ranks."""
        group = dist.group.WORLD if group is None else group
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorGroup":
        return self  # a process group cannot be copied

    def gather_columns(self, piece: torch.Tensor) -> torch.Tensor:
        """Every rank's columns [T, n], by rank -> [T, size * n]; the gradient is the sum of all ranks', own columns.

        For what each rank goes on with by itself: its part of a linear that sums over all columns.
        """
        return _GatherColumns.apply(piece, self, True)  # type: ignore[no-any-return]

    def join_columns(self, piece: torch.Tensor) -> torch.Tensor:
        """As gather_columns, for what all ranks go on with alike: the gradient is the same on all, own columns."""
        return _GatherColumns.apply(piece, self, False)  # type: ignore[no-any-return]

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """x itself, which all ranks have alike; each goes on with it by itself, so its gradient is the ranks' sum."""
        return _Share.apply(x, self)  # type: ignore[no-any-return]

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts, in their dtype, the same bits on all ranks; the gradient is the sum's."""
        return _Add.apply(part, self)  # type: ignore[no-any-return]

    @torch.no_grad()
    def gather_codes(self, piece: QuantizedTensor) -> QuantizedTensor:
        """Every rank's columns of an operand in blocks of 1 x 128, by rank: codes and scales in one message.

        Args:
            piece: [T, n], n a multiple of 128.
        Returns:
            [T, size * n], as quantize would have made it of the whole matrix; until the next call, as pushes says.
        """
        tokens, columns = piece.shape
        codes, scales = piece.qdata.view(torch.uint8), piece.scale.t()  # [T, n], [n / 128, T]
        if (one_shot := self._one_shot(codes)) is not None:
            made = one_shot.gather_codes(codes.contiguous(), scales.contiguous())
            if made is not None:
                return QuantizedTensor.trusted(made[0].view(piece.qdata.dtype), made[1].t(), piece.scaling)
        if (pushes := self._pushes(codes)) is not None:
            came = pushes.gather_columns(codes, scales.contiguous().view(1, -1))
            if came is not None:
                scale = came[1].view(-1, tokens).t()
                return QuantizedTensor.trusted(came[0].view(piece.qdata.dtype), scale, piece.scaling)
        sent = torch.cat([codes.reshape(-1), scales.contiguous().view(torch.uint8).reshape(-1)])
        received = sent.new_empty(self.size, len(sent))
        all_gather_into(received.view(-1), sent, group=self.group)
        of_codes = received[:, : codes.numel()].view(self.size, tokens, columns)
        of_scales = received[:, codes.numel() :].view(torch.float32)  # [size, n / 128 * T]
        qdata = of_codes.transpose(0, 1).reshape(tokens, self.size * columns).view(piece.qdata.dtype)
        return QuantizedTensor.trusted(qdata, of_scales.reshape(-1, tokens).t(), piece.scaling)

    @torch.no_grad()
    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Every rank's columns [T, n], by rank -> [T, size * n], apart from autograd."""
        return self._gathered(piece)

    @torch.no_grad()
    def deal_columns(self, piece: torch.Tensor) -> torch.Tensor:
        """This rank's share of the rows of every rank's columns [T, n]: [rows, size * n]; until the next call."""
        return self._deal(piece, is_sum=False)

    @torch.no_grad()
    def gather_rows(self, share: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Every rank's share of the rows [rows, n], by rank -> [num_rows, n]."""
        pushes = self._pushes(share)
        if pushes is not None and (came := pushes.gather_rows(num_rows, share)) is not None:
            return came[0].clone()
        return self._gather_rows(share, num_rows)

    @torch.no_grad()
    def gather_row_codes(self, share: QuantizedTensor, num_rows: int) -> QuantizedTensor:
        """As gather_rows, of an operand whose scales each belong to one row; until the next call, as pushes says."""
        codes, scales = share.qdata.view(torch.uint8), share.scale.t().contiguous()  # [rows, n], [m, rows]
        pushes = self._pushes(codes)
        came = None if pushes is None else pushes.gather_rows(num_rows, codes, scales)
        if came is None:
            came = [self._gather_rows(codes, num_rows), self._gather_rows(share.scale, num_rows).t().contiguous()]
        return QuantizedTensor.trusted(came[0].view(share.qdata.dtype), came[1].t(), share.scaling)

    def share_of(self, num_rows: int) -> slice:
        """The rows of a matrix that this rank goes on with where each does with a share."""
        return share_of(num_rows, self.rank, self.size)

    @torch.no_grad()
    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts, apart from autograd; the same bits on all ranks."""
        return _summed(part, self)

    @torch.no_grad()
    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' numbers, element by element; free of NaN."""
        found = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' numbers; all must ask."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return int(min(found))

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """outcome.together among these ranks: every rank's value; where it fails on one, all raise."""
        return together(self.group or dist.group.WORLD, work)

    def is_long(self, num_bytes: int) -> bool:
        """Whether a message of a rank is one of which each rank goes on with a share of the rows."""
        return num_bytes >= MIN_DEALT_BYTES

    def _one_shot(self, message: torch.Tensor) -> OneShot | None:
        """For messages of one host's GPUs, whose sizes are the same on all ranks."""
        return one_shot_of(self.group, message.device) if message.is_cuda and message.numel() else None

    def _pushes(self, message: torch.Tensor) -> Pushes | None:
        """For what is too large for one_shot."""
        return pushes_of(self.group, message.device) if message.is_cuda else None

    def _deal(self, own: torch.Tensor, *, is_sum: bool) -> torch.Tensor:
        """This rank's rows of all ranks' parts, added [rows, K], or of their columns, by rank [rows, size * n]."""
        if (pushes := self._pushes(own)) is not None and (came := pushes.deal(own, is_sum=is_sum)) is not None:
            return pushes.add(came) if is_sum else came
        rows = self.share_of(own.shape[0])
        came = exchange(by_owner(own, self.size), self.group)[:, : rows.stop - rows.start]
        return reference.add(list(came)) if is_sum else reference.gather(list(came))

    def _gather_rows(self, share: torch.Tensor, num_rows: int) -> torch.Tensor:
        missing = rows_each(num_rows, self.size) - len(share)
        share = pad(share, (0, 0, 0, missing)).contiguous()  # a share may be stored by columns on one rank alone
        return side_by_side(share, 0, self.group)[:num_rows]

    def _gathered(self, piece: torch.Tensor) -> torch.Tensor:
        if (one_shot := self._one_shot(piece)) is not None:
            made = one_shot.gather_columns(piece.contiguous())
            if made is not None:
                return made
        return side_by_side(piece.contiguous(), 1, self.group)

    def _own_columns(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.unflatten(1, (self.size, -1))[:, self.rank]


@dataclasses.dataclass(frozen=True)
class PartialRows:
    """A matrix [T, K] of which each rank has a part; the next norm's kernel puts them together.

    Attributes:
        own: this rank's: [T, K], what is to be added, or its columns [T, K / size].
        tensor_group: the ranks.
        is_sum: which of the two.
    """

    own: torch.Tensor
    tensor_group: TensorGroup
    is_sum: bool

    def whole(self) -> torch.Tensor:
        """[T, K], the same on all ranks; without gradients."""
        return self.tensor_group.sum(self.own) if self.is_sum else self.tensor_group.gather(self.own)

    def places(self) -> Places | None:
        """Where the ranks' parts can meet in one kernel; None where whole() takes the process group."""
        one_shot = self.tensor_group._one_shot(self.own)
        return None if one_shot is None or self.own.nbytes > one_shot.max_bytes else one_shot.places

    def is_long(self) -> bool:
        """Whether, without places, what follows is to be computed of a share of the rows by each rank."""
        group = self.tensor_group
        return group.is_long(self.own.nbytes) and len(self.own) >= MIN_DEALT_ROWS * group.size

    def share(self) -> torch.Tensor:
        """This rank's rows of the whole: [rows, K]; without gradients, until the next call, as pushes says."""
        return self.tensor_group._deal(self.own, is_sum=self.is_sum)


@dataclasses.dataclass(frozen=True)
class RowShare:
    """A matrix [T, K] of which each rank has a share of the rows.

    Attributes:
        own: [rows, K].
        num_rows: T.
        tensor_group: the ranks.
    """

    own: torch.Tensor
    num_rows: int
    tensor_group: TensorGroup

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.own.dtype

    def whole(self) -> torch.Tensor:
        """[T, K], the same on all ranks."""
        return self.tensor_group.gather_rows(self.own, self.num_rows)


def whole(x: T | PartialRows | RowShare | ExpertRows) -> T | torch.Tensor:
    """x itself, or what its parts make."""
    return x.whole() if isinstance(x, PartialRows | RowShare | ExpertRows) else x


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, tensor_group: TensorGroup, is_summed: bool) -> torch.Tensor:
        ctx.tensor_group, ctx.is_summed = tensor_group, is_summed
        return tensor_group._gathered(piece)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor_group = ctx.tensor_group
        if not ctx.is_summed:
            return tensor_group._own_columns(grad).contiguous(), None, None
        by_rank = grad.unflatten(1, (tensor_group.size, -1)).transpose(0, 1).contiguous()  # [size, T, n]
        own = torch.empty_like(by_rank[0])
        reduce_scatter_into(own.view(-1), by_rank.view(-1), group=tensor_group.group)
        return own, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor_group: TensorGroup) -> torch.Tensor:
        ctx.tensor_group = tensor_group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _summed(grad, ctx.tensor_group), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tensor_group: TensorGroup) -> torch.Tensor:
        return _summed(part, tensor_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


def _summed(part: torch.Tensor, tensor_group: TensorGroup) -> torch.Tensor:
    if (one_shot := tensor_group._one_shot(part)) is not None and (total := one_shot.add(part)) is not None:
        return total
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tensor_group.group)
    return total
