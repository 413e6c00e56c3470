"""Ground truth of quantizing many matrices: one after the other."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from octavo.numerics.scaling import block_amax
from octavo.ops.quantize import quantize as quantize_one

if TYPE_CHECKING:
    from octavo.ops.quantize.many import MatrixBatch


def quantize(
    batch: "MatrixBatch", quant_scales: torch.Tensor | None, amaxes: Sequence[torch.Tensor] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As MatrixBatch.quantize."""
    made = []
    for i, x in enumerate(batch.matrices):
        known = None if quant_scales is None else quant_scales[i]
        amax = None if amaxes is None else amaxes[i]
        made.append(quantize_one(x.to(torch.bfloat16), batch.scaling, quant_scale=known, amax_out=amax))
    return [q.qdata.view(torch.uint8).view(-1) for q in made], [q.scale.view(-1) for q in made]


def fold_amaxes(batch: "MatrixBatch", amaxes: torch.Tensor) -> None:
    """As MatrixBatch.fold_amaxes."""
    for i, x in enumerate(batch.matrices):
        amaxes[i] = torch.maximum(amaxes[i], block_amax(x.to(torch.bfloat16), (-1, -1))[0, 0])
