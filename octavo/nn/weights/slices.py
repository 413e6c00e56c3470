"""Slices: which rows and columns of a whole weight a tensor-parallel rank holds, and what these are of given ones."""

import dataclasses
import itertools

import torch

from octavo.nn.weights.operands import Operands
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling


@dataclasses.dataclass(frozen=True)
class Slices:
    """A rank's share of a linear.

    Attributes:
        parts: rows of the whole weight that were fused, part by part.
        rows: of the whole weight, a range a part.
        columns: of the whole weight.
    """

    parts: tuple[int, ...]
    rows: tuple[slice, ...]
    columns: slice

    def of_values(self, whole: torch.Tensor) -> torch.Tensor:
        """The share of a weight [N, K] or a bias [N], in memory of its own."""
        if whole.dim() == 1:
            return torch.cat([whole[each] for each in self.rows])
        return torch.cat([whole[each, self.columns] for each in self.rows])

    def of_codes(self, whole: Operands) -> list[QuantizedTensor]:
        """The share of a weight's codes, one QuantizedTensor a part; blocks are not cut."""
        return [self._of_part(whole, rows) for rows in self.rows]

    def of_parts(self) -> list[tuple[slice, slice]]:
        """The share of each part of the whole: rows of the part, and columns."""
        starts = itertools.accumulate(self.parts[:-1], initial=0)
        places = zip(starts, self.rows, strict=True)
        return [(slice(rows.start - start, rows.stop - start), self.columns) for start, rows in places]

    def _of_part(self, whole: Operands, rows: slice) -> QuantizedTensor:
        begin, codes = next((r.start, q) for r, q in whole if r.start <= rows.start < r.stop)
        rows = slice(rows.start - begin, rows.stop - begin)
        scale = scales_of(codes.scale, codes.scaling, rows, self.columns)
        qdata = codes.qdata.view(torch.uint8)[rows, self.columns].contiguous().view(codes.qdata.dtype)
        return QuantizedTensor(qdata, scale.clone(), codes.scaling)


def scales_of(scale: torch.Tensor, scaling: Scaling, rows: slice, columns: slice) -> torch.Tensor:
    """The scales of some rows and columns, which begin with a block each; a view."""
    for dim, (size, each) in enumerate(zip(scaling.block_size, (rows, columns), strict=True)):
        if size != -1:
            scale = scale.narrow(dim, each.start // size, -(-each.stop // size) - each.start // size)
    return scale
