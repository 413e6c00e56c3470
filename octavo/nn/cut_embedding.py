"""CutEmbedding: a rank's rows of an embedding that tensor-parallel ranks have cut along the vocabulary; and embed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from octavo.distributed.cut import Cut
from octavo.distributed.tensor_group import TensorGroup
from octavo.distributed.token_shards import TokenShards
from octavo.nn.weights.slices import Slices


class CutEmbedding(nn.Embedding):
    """Rows of an embedding [V, K], an equal share for each rank; as a head that is tied to it these are its rows.

    Args:
        weight: this rank's rows, [V / ranks, K].
        slices: which these are.
        group: the ranks.
    Attributes:
        cut: where the weight lies in the whole one.
    """

    is_cut = True

    def __init__(self, weight: nn.Parameter, slices: Slices, group: TensorGroup) -> None:
        num_rows, width = weight.shape
        super().__init__(num_rows, width, _weight=weight)
        self.weight = weight  # which may have no gradient
        self.slices, self.tensor_group = slices, group
        self.cut = Cut((sum(slices.parts), width), slices.rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 of the whole vocabulary, the same on all ranks -> [T, K], the bits of one GPU, on all ranks."""
        return self.tensor_group.add(self.part(ids))

    def part(self, ids: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum that forward makes: its rows [T, K], and -0.0 for the ids of other ranks.

        Of ids that are no row of the whole the first rank looks up those below, the last one those above, and so they
        are the error that torch's embedding makes of them.
        """
        rank, size, num_rows = self.tensor_group.rank, self.tensor_group.size, self.weight.shape[0]
        own = ids - rank * num_rows
        is_other = own < 0 if rank else own >= num_rows
        if 0 < rank < size - 1:
            is_other = is_other | (own >= num_rows)
        return _OwnRows.apply(own, is_other, self.weight)  # type: ignore[no-any-return]


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, is_other: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.num_rows = weight.shape[0]
        if ctx.needs_input_grad[2]:
            ctx.save_for_backward(own.masked_fill(is_other, ctx.num_rows))
        rows = F.embedding(own.masked_fill(is_other, 0), weight)
        return rows.masked_fill_(is_other[:, None], -0.0)  # unlike 0.0 it leaves every number as it is, -0.0 too

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,), num_rows = ctx.saved_tensors, ctx.num_rows
        # the row behind the last one takes what is other ranks', and no gradient
        made = torch.ops.aten.embedding_dense_backward(grad, rows, num_rows + 1, num_rows, False)
        return None, None, made[:num_rows]


def embed(embedding: nn.Embedding, ids: torch.Tensor, shards: TokenShards | None) -> torch.Tensor:
    """ids [T] int64 -> [T, K] of the embedding; with shards [t, K], this rank's tokens.

    The gradient comes to every rank whole, so that the embedding's is that of all tokens, of the rows that it has.
    """
    if isinstance(embedding, CutEmbedding):
        return embedding(ids) if shards is None else shards.add(embedding.part(ids))  # type: ignore[no-any-return]
    embedded = F.embedding(ids, embedding.weight)
    return embedded if shards is None else shards.own(embedded)
