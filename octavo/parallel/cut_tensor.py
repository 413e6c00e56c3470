"""A rank's slice of a tensor, as torch.distributed.checkpoint takes a DTensor; imported late, which takes a while."""

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from octavo.distributed.cut import Cut
from octavo.distributed.shards import local, rows_of


class CutTensor(torch.Tensor):
    """The shape of a whole tensor, and the pieces of it that are on this rank; it computes nothing.

    Args:
        own: this rank's slice; a DTensor where other ranks hold rows of the slice.
        cut: where the slice lies.
    """

    _pieces: dict[torch.Size, torch.Tensor]  # by the place of their first element

    def __new__(cls, own: torch.Tensor, cut: Cut) -> "CutTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(cut.shape), dtype=own.dtype, device=torch.device("cpu")
        )
        first_column = 0 if cut.columns is None else cut.columns.start
        rest = (first_column,) if len(cut.shape) == 2 else ()
        found = cut.pieces(*rows_of(own)[:2])
        made._pieces = {torch.Size((first, *rest)): local(own)[rows] for first, rows in found}
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        raise TypeError(f"a slice that is read or written computes nothing, got {func}")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(place, piece.size()) for place, piece in self._pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, index
        return self._pieces[index.offset]
