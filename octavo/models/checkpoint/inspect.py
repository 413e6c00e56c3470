"""A checkpoint's tensors at a glance: dtype, shape, quantization scheme, scales; what is missing and what is unused.

Reads headers only, and shows dialects too that octavo does not load.
"""

import dataclasses
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import record
from octavo.models.checkpoint.dialects import CONFIG_FILE, detect_dialect, read_config
from octavo.models.checkpoint.names import is_ignored, parameter_names
from octavo.models.checkpoint.record import Record
from octavo.models.checkpoint.safetensors_io import SafetensorsReader, TensorEntry
from octavo.models.config import ModelConfig

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Suffixes that dialects give to the decode scale of a weight.
_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
# Scales of activations and of the KV cache.
_OTHER_SCALES = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale")


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """One tensor of a checkpoint.

    Attributes:
        scheme: "per_tensor", "per_row", "block_128x128" or another block shape for FP8 codes; "scale" for a scale;
            "high precision" for the rest.
        scale_shape: of FP8 codes, else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scheme: str
    scale_shape: tuple[int, ...] | None
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """All tensors, one sentence for each thing that is wrong, and octavo's own record where it wrote the checkpoint."""

    dialect: str
    rows: list[TensorRow]
    problems: list[str]
    record: Record | None

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)


def inspect_checkpoint(path: str | Path) -> CheckpointReport:
    """Look at a checkpoint directory or a single .safetensors file.

    Returns:
        Every tensor; problems are missing and unused scales and, where config.json is of a known architecture,
        missing, unused and misshapen tensors.
    Raises:
        CheckpointError: nothing there, or damaged files.
    """
    reader = SafetensorsReader(path)
    scales = {name: _weight_of(name, reader) for name in reader.entries if _is_scale(name)}
    by_weight = {weight: scale for scale, weight in scales.items() if weight is not None}
    rows = [
        _row(entry, reader.entries.get(by_weight.get(name, "")), name in scales)
        for name, entry in reader.entries.items()
    ]
    problems = [
        f"missing scale: {entry.name} is {_dtype_name(entry)} and has none"
        for entry in reader.entries.values()
        if entry.dtype in _FP8 and entry.name not in by_weight
    ]
    for scale, weight in scales.items():
        if scale.endswith(_WEIGHT_SCALES) and (weight is None or reader.entries[weight].dtype not in _FP8):
            problems.append(f"unused scale: {scale} goes with no FP8 weight")
    problems += [f"unknown scheme: {row.name}'s scale has shape {row.scale_shape}" for row in rows if row.scheme == "?"]
    dialect, more = _check_architecture(Path(path), reader, set(scales))
    return CheckpointReport(dialect, rows, problems + more, record.read(Path(path)))


def _is_scale(name: str) -> bool:
    return name.endswith(_WEIGHT_SCALES) or name.endswith(_OTHER_SCALES)


def _weight_of(scale: str, reader: SafetensorsReader) -> str | None:
    """The weight that a weight scale belongs to, None for other scales and for orphans."""
    for suffix in _WEIGHT_SCALES:
        if scale.endswith(suffix):
            weight = scale.removesuffix(suffix) + "weight"
            return weight if weight in reader.entries else None
    return None


def _row(entry: TensorEntry, scale: TensorEntry | None, is_scale: bool) -> TensorRow:
    num_bytes = entry.dtype.itemsize * torch.Size(entry.shape).numel()
    if is_scale:
        scheme = "scale"
    elif entry.dtype in _FP8:
        scheme = _scheme(entry.shape, scale.shape) if scale else "no scale"
    else:
        scheme = "high precision"
    scale_shape = scale.shape if scale and entry.dtype in _FP8 else None
    return TensorRow(entry.name, _dtype_name(entry), entry.shape, scheme, scale_shape, num_bytes)


def _scheme(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> str:
    """The block shape that a scale's shape says, "?" where it fits none."""
    if torch.Size(scale_shape).numel() == 1:
        return "per_tensor"
    if len(shape) != 2 or scale_shape in ((shape[0],), (shape[0], 1)):
        return "per_row" if len(shape) == 2 else "?"
    for block in ((128, 128), (1, 128), (1, 32)):
        if scale_shape == tuple(-(-size // step) for size, step in zip(shape, block, strict=True)):
            return f"block_{block[0]}x{block[1]}"
    return "?"


def _dtype_name(entry: TensorEntry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _check_architecture(path: Path, reader: SafetensorsReader, scales: set[str]) -> tuple[str, list[str]]:
    """The dialect, and what the tensors lack against config.json."""
    if not (path / CONFIG_FILE).is_file():
        return "unknown", [] if path.is_file() else [f"no {CONFIG_FILE} beside the tensors"]
    try:
        fields = read_config(path)
        dialect = detect_dialect(fields)
        shapes = {k: v for p in parameter_names(ModelConfig.from_hf(fields)) for k, v in p.part_shapes.items()}
    except CheckpointError as error:
        return "unknown", [str(error)]
    problems = [f"missing tensor: {name}" for name in shapes if name not in reader.entries]
    for name, entry in reader.entries.items():
        if name in shapes and entry.shape != shapes[name]:
            problems.append(f"wrong shape: {name} is {entry.shape}, config.json asks for {shapes[name]}")
        is_tied_head = name == "lm_head.weight" and fields.get("tie_word_embeddings")
        if name not in shapes | dict.fromkeys(scales) and not is_ignored(name) and not is_tied_head:
            problems.append(f"unused tensor: {name}")
    return dialect, problems
