"""One safetensors file written by several processes, each its rows: the header alone says where a row goes.

Nothing travels between them and none holds more than it has; the bytes are those of safetensors' own writer.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from octavo.distributed.cut import Cut

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class FileLayout:
    """Where each tensor of a file begins.

    Attributes:
        header: the file's first bytes.
        starts: name -> byte of the file.
        num_bytes: of the whole file.
    """

    header: bytes
    starts: Mapping[str, int]
    num_bytes: int

    def create(self, path: Path) -> None:
        """Make the file in its full length, without the tensors' values."""
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.num_bytes)


def lay_out(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    """The layout of a file with these tensors.

    Args:
        tensors: bf16 and fp32; shapes and dtypes alone count, so they may be on "meta".
    Source:
        the safetensors format; order as its writer's: larger dtypes first, then by name.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        begin, end = end, end + tensor.numel() * tensor.element_size()
        offsets[name] = begin
        fields[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, {name: len(header) + begin for name, begin in offsets.items()}, len(header) + end)


def write_rows(file: BinaryIO, start: int, first_row: int, rows: torch.Tensor, cut: Cut | None = None) -> None:
    """Write some rows of a tensor, or of a range of its columns, to their place.

    Args:
        file: open for reading and writing.
        start: where the tensor begins.
        first_row: the first one's number.
        rows: [rows, ...] on any device, in the file's dtype.
        cut: which columns these are.
    """
    dense = rows.detach().cpu().contiguous()
    if cut is not None and cut.columns is not None:
        for index, row in enumerate(dense):
            file.seek(start + ((first_row + index) * cut.shape[1] + cut.columns.start) * row.element_size())
            file.write(memoryview(row.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return
    file.seek(start + first_row * dense[:1].nbytes)
    file.write(memoryview(dense.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
