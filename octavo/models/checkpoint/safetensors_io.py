"""safetensors on the disk: a checked view of one file or of a sharded index, and writing as either."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.models.checkpoint.parallel_read import ParallelReader

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
Place = tuple[slice, slice]  # rows and columns of a tensor
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """What a header says about one tensor: name, dtype, shape, file, and at which byte of that it begins."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsReader:
    """The tensors of a checkpoint directory or of one file; headers are checked at once, data is read on demand.

    Args:
        path: a directory with model.safetensors or model.safetensors.index.json, or a .safetensors file.

    Attributes:
        entries: name -> TensorEntry, in the files' order.

    Raises:
        CheckpointError: nothing there, a missing shard, a truncated or malformed file, a tensor twice.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, TensorEntry] = {}
        self._bytes = ParallelReader()
        weight_map = _read_index(self.path)
        for file in _files(self.path, weight_map):
            for entry in read_header(file):
                if entry.name in self.entries:
                    raise CheckpointError(
                        f"{entry.name} is in {self.entries[entry.name].file.name} and in {file.name} of {self.path}"
                    )
                self.entries[entry.name] = entry
        for name, file_name in weight_map.items():
            if name not in self.entries or self.entries[name].file.name != file_name:
                raise CheckpointError(f"{self.path / INDEX_FILE}: {name} should be in {file_name} and is not")

    def load(self, name: str, device: torch.device | str = "cpu", place: Place | None = None) -> torch.Tensor:
        """Read one tensor; a GPU's is copied there as it lies in the file, and looked at there.

        Args:
            place: which rows, and which columns of a matrix, are wanted; no byte beside them is read. None for all.
        Raises:
            CheckpointError: there is none of this name, it cannot be read, or it holds inf or NaN.
        """
        entry = self._entry(name)
        if place is None:
            tensor = self.load_flat(name, 0, math.prod(entry.shape), device).view(entry.shape)
        else:
            tensor = self._load_place(entry, *place, device)
        check_finite(name, tensor, entry.file)
        return tensor

    def load_flat(self, name: str, first: int, num: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read elements of one tensor, and no byte beside them; inf and NaN are not looked for.

        Args:
            first: the first one's place in memory order.
            num: how many.
        Returns:
            [num], in the file's dtype.
        Raises:
            CheckpointError: there is none of this name, or it cannot be read.
        """
        entry = self._entry(name)
        size = entry.dtype.itemsize
        raw = torch.empty(num * size, dtype=torch.uint8, device=device)
        self._read(entry, first * size, raw)
        return raw.view(entry.dtype)

    def _load_place(self, entry: TensorEntry, rows: slice, columns: slice, device: torch.device | str) -> torch.Tensor:
        num_rows, num_columns = rows.stop - rows.start, math.prod(entry.shape[1:])
        if len(entry.shape) == 1 or columns == slice(0, num_columns):
            values = self.load_flat(entry.name, rows.start * num_columns, num_rows * num_columns, device)
            return values.view(num_rows, *entry.shape[1:])
        size = entry.dtype.itemsize
        raw = torch.empty(num_rows, (columns.stop - columns.start) * size, dtype=torch.uint8, device=device)
        self._read(entry, (rows.start * num_columns + columns.start) * size, raw, num_columns * size)
        return raw.view(entry.dtype)

    def _read(self, entry: TensorEntry, first: int, raw: torch.Tensor, stride: int = 1) -> None:
        """Fill raw from a byte of a tensor on."""
        try:
            self._bytes.read(entry.file, entry.start + first, raw, stride)
        except OSError as error:
            raise CheckpointError(f"{entry.file}: cannot read {entry.name}: {error}") from error

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self.entries[name]


def check_finite(name: str, tensor: torch.Tensor, where: Path | str) -> None:
    """Refuse inf and NaN, as numbers and as FP8 codes.

    Raises:
        CheckpointError: naming the tensor and how many elements are bad.
    """
    if not tensor.dtype.is_floating_point:
        return
    if tensor.element_size() > 1:
        bad = ~torch.isfinite(tensor)
    elif tensor.dtype == torch.float8_e8m0fnu:
        bad = tensor.view(torch.uint8) == 0xFF
    else:
        first_bad = 0x7F if tensor.dtype == torch.float8_e4m3fn else 0x7C
        bad = (tensor.view(torch.uint8) & 0x7F) >= first_bad
    if bad.any():
        raise CheckpointError(
            f"{where}: {name} holds {int(bad.sum())} NaN or infinite values of {tensor.numel()}; the checkpoint is "
            "damaged or its training diverged"
        )


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors that a .safetensors file declares, checked against the file's length.

    Raises:
        CheckpointError: no such file, truncated, or not safetensors; the first tensor affected is named.
    Source:
        the safetensors format: 8 bytes of header length, JSON, then the tensors' bytes without gaps.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_len = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 or header_len > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: not a safetensors file ({num_bytes} bytes)")
        text = stream.read(header_len)
    if len(text) < header_len:
        raise CheckpointError(f"{file}: truncated inside its header: {num_bytes} bytes; copy the file again")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        rows = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        return list(_entries(file, rows, 8 + header_len, num_bytes - 8 - header_len))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: malformed header ({error!r})") from error


def _entries(file: Path, rows: list[tuple[str, Any]], first_byte: int, num_data_bytes: int) -> Iterator[TensorEntry]:
    end = 0
    for name, fields in rows:
        if fields["dtype"] not in _DTYPES:
            raise CheckpointError(f"{file}: {name} has dtype {fields['dtype']}, which octavo does not read")
        dtype, shape = _DTYPES[fields["dtype"]], tuple(int(size) for size in fields["shape"])
        start, stop = fields["data_offsets"]
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{file}: the header's offsets of {name} do not fit its shape {shape}")
        if stop > num_data_bytes:
            raise CheckpointError(
                f"{file}: truncated: {name} ends at byte {stop} of the data, of which the file has {num_data_bytes}; "
                "copy the file again"
            )
        end = stop
        yield TensorEntry(name, dtype, shape, file, first_byte + start)
    if end != num_data_bytes:
        raise CheckpointError(f"{file}: {num_data_bytes - end} bytes follow the last tensor; the file is damaged")


def _read_index(path: Path) -> dict[str, str]:
    """name -> file name, of a sharded checkpoint; empty for one file."""
    file = path / INDEX_FILE
    if not path.is_dir() or (path / SINGLE_FILE).is_file() or not file.is_file():
        return {}
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): Path(file_name).name for name, file_name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not an index of shards ({error!r})") from error


def _files(path: Path, weight_map: Mapping[str, str]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such checkpoint; give a directory with {SINGLE_FILE} (names on a hub are "
            "not looked up: download the files first)"
        )
    if not weight_map:
        if not (path / SINGLE_FILE).is_file():
            part = min((file.name for file in path.glob("*.safetensors")), default="")
            advice = f"; {part} alone is a part without an index: write the whole model, or its index" if part else ""
            raise CheckpointError(f"{path}: no {SINGLE_FILE} and no {INDEX_FILE} there{advice}")
        return [path / SINGLE_FILE]
    files = [path / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            lost = [name for name, file_name in weight_map.items() if file_name == file.name]
            raise CheckpointError(f"{file}: this shard is missing, and with it {len(lost)} tensors such as {lost[0]}")
    return files


def write_tensors(
    directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[str]:
    """Write tensors as one file, or as shards with an index where they exceed max_shard_bytes.

    Args:
        tensors: Hugging Face names; any strides and devices.
    Returns:
        The names of the files written.
    Raises:
        CheckpointError: a tensor holds inf or NaN; nothing was written then.
    """
    for name, tensor in tensors.items():
        check_finite(name, tensor, "the model")
    files = split_into_files(tensors, max_shard_bytes)
    for file_name, names in files.items():
        _write_file(directory / file_name, tensors, names)
    return [*files, *write_index(directory, files, tensors)]


def split_into_files(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> dict[str, list[str]]:
    """Which file of a checkpoint holds which tensors: file name -> their names, in order.

    Args:
        tensors: sizes and dtypes alone count; they may be on "meta".
    """
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_index(directory: Path, files: Mapping[str, list[str]], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Write the index where there are several files: [its name], or nothing."""
    if len(files) == 1:
        return []
    weight_map = {name: file_name for file_name, names in files.items() for name in names}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [INDEX_FILE]


def _write_file(file: Path, tensors: Mapping[str, torch.Tensor], names: list[str]) -> None:
    save_file({name: tensors[name].detach().cpu().contiguous() for name in names}, file, metadata={"format": "pt"})


def _shards(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= num_bytes
    return shards
