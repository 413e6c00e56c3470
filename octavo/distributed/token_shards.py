"""The tokens of a batch cut among tensor-parallel ranks (sequence parallelism), and what travels between them.

Legend: T packed tokens, t = ceil(T / ranks) rows of a rank, K columns. Rank r has rows r * t to (r + 1) * t; rows
from T on are zeros, which fill up the last ranks and are cut off wherever rows meet.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from octavo.distributed.collectives import by_owner, exchange, reduce_scatter_into, side_by_side
from octavo.distributed.tensor_group import TensorGroup
from octavo.numerics.quantized import QuantizedTensor
from octavo.ops.push.reference import rows_each

_Move = Callable[[torch.Tensor, int], torch.Tensor]


class TokenShards:
    """Between two blocks each rank has its own rows alone; what moves them is differentiable.

    Attributes:
        group: the ranks, each of which also holds slices of every linear.
        num_tokens: T of the batch that a layer is computing; the layer sets it, also where it is recomputed.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group, self.num_tokens = group, 0

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows [t, K] of what all ranks have alike, [T, K]; the gradient is every rank's, by rank."""
        return self._move(x, self._cut, self.gathered)

    def join(self, own: torch.Tensor) -> torch.Tensor:
        """Every rank's rows, for what all ranks go on with alike: [t, K] -> [T, K]; the gradient is its own rows."""
        return self._move(own, self.gathered, self._cut)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """As join, for what each rank goes on with by itself: the gradient is the sum of all ranks', own rows."""
        return self._move(own, self.gathered, self._added)

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """Own rows of the sum of the ranks' parts, in their dtype: [T, K] -> [t, K]; the gradient is every rank's."""
        return self._move(part, self._added, self.gathered)

    def exchange(self, columns: torch.Tensor) -> torch.Tensor:
        """All columns of the own rows, of which each rank has its columns: [T, K / ranks] -> [t, K]."""
        return self._move(columns, self._to_rows, self._to_columns)

    def num_own(self, num_tokens: int) -> int:
        """Rows of each rank, t, zeros included."""
        return rows_each(num_tokens, self.group.size)

    @torch.no_grad()
    def gathered(self, own: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Every rank's rows, apart from autograd: [t, K] -> [num_tokens, K]."""
        rows = side_by_side(own, 0, self.group.group)
        return rows if len(rows) == num_tokens else rows[:num_tokens]

    @torch.no_grad()
    def gather_codes(self, own: QuantizedTensor, dim: int) -> QuantizedTensor:
        """Every rank's codes and scales, by rank, where no rank has zeros.

        Args:
            own: of the rank's tokens, which lie along dim: [t, K] or [K, t], in whole blocks; under scales of all ranks
                where one is of all tokens.
        Returns:
            [T, K] or [K, T], as quantize would have made it of the whole matrix.
        """
        codes = side_by_side(own.qdata.view(torch.uint8), dim, self.group.group).view(own.qdata.dtype)
        is_shared = own.scaling.block_size[dim] == -1
        scale = own.scale if is_shared else side_by_side(own.scale, dim, self.group.group)
        return QuantizedTensor.trusted(codes, scale, own.scaling)

    def _move(self, x: torch.Tensor, move: _Move, back: _Move) -> torch.Tensor:
        return _Moved.apply(x, move, back, self.num_tokens)  # type: ignore[no-any-return]

    def _cut(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        num = self.num_own(num_tokens)
        return _filled(x[self.group.rank * num : (self.group.rank + 1) * num], num)

    def _added(self, part: torch.Tensor, num_tokens: int) -> torch.Tensor:
        pieces = by_owner(part, self.group.size)
        own = torch.empty_like(pieces[0])
        reduce_scatter_into(own.view(-1), pieces.view(-1), group=self.group.group)
        return own

    def _to_rows(self, columns: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return exchange(by_owner(columns, self.group.size), self.group.group).transpose(0, 1).flatten(1)

    def _to_columns(self, own: torch.Tensor, num_tokens: int) -> torch.Tensor:
        pieces = own.unflatten(1, (self.group.size, -1)).transpose(0, 1).contiguous()
        return exchange(pieces, self.group.group).flatten(0, 1)[:num_tokens]


def _filled(x: torch.Tensor, num: int) -> torch.Tensor:
    """A copy of x [n, K] with zeros after it: [num, K]."""
    return F.pad(x, (0, 0, 0, num - x.shape[0]))


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: _Move, back: _Move, num_tokens: int) -> torch.Tensor:
        ctx.back, ctx.num_tokens = back, num_tokens
        return move(x, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grad, ctx.num_tokens), None, None, None
