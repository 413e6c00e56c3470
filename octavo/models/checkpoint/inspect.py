"""A checkpoint's tensors at a glance: dtype, shape, quantization scheme, scales; what is missing and what is unused.

Reads headers only, and shows dialects too that octavo does not load.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import bf16, kv_scales, record
from octavo.models.checkpoint.dialects import CONFIG_FILE, read_config, read_layout
from octavo.models.checkpoint.layout import Layout
from octavo.models.checkpoint.names import parameter_names
from octavo.models.checkpoint.record import Record
from octavo.models.checkpoint.safetensors_io import SafetensorsReader, TensorEntry
from octavo.models.checkpoint.scaled_weight import find_scale, input_scale_misfits, scale_shapes
from octavo.models.checkpoint.stored import find_problems
from octavo.models.config import ModelConfig
from octavo.numerics import Scaling

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Last parts of the names that dialects give to the decode scale of a weight.
_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
# Scales of outputs and of the KV cache.
_OTHER_SCALES = ("output_scale", "k_scale", "v_scale", "q_scale", "kv_scale", "_cache.scale")
_CODES, _SCALES, _HIGH_PRECISION = "FP8 codes", "scales", "high precision"


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

    @property
    def kind(self) -> str:
        """What its bytes are: FP8 codes, scales, or high precision."""
        return self.scheme if self.scheme == _HIGH_PRECISION else _SCALES if self.scheme == "scale" else _CODES


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """Modules with one name but for their numbers, and with one format.

    Attributes:
        name: the modules' name with * for numbers.
        count: how many there are.
        scheme: of their codes, or "high precision".
        dtype: of their weights.
        weight_scale: dtype of the weight's scale beside it, None where there is none.
        input_scale: dtype of the input's scale beside the weight, None where there is none.
    """

    name: str
    count: int
    scheme: str
    dtype: str
    weight_scale: str | None
    input_scale: str | None


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """What a checkpoint holds, and what is wrong with it.

    Attributes:
        dialect: its name, "unknown" where octavo does not load it.
        layout: what it declares, None where unknown.
        rows: every tensor.
        modules: every kind of linear.
        problems: one sentence each.
        kv_scales: spelling of a KV scale, with * for numbers -> how many there are.
        record: octavo's own where it wrote the checkpoint.
    """

    dialect: str
    layout: Layout | None
    rows: list[TensorRow]
    modules: list[ModuleRow]
    kv_scales: dict[str, int]
    problems: list[str]
    record: Record | None

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def num_bytes_by_kind(self) -> dict[str, int]:
        """FP8 codes, scales and high precision -> bytes."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found[row.kind] += row.num_bytes
        return {kind: found[kind] for kind in (_CODES, _SCALES, _HIGH_PRECISION) if kind in found}


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
    declared = _declared_weight(Path(path))
    rows = [
        _row(entry, reader.entries.get(by_weight.get(name, "")), name in scales, declared)
        for name, entry in reader.entries.items()
    ]
    coded = {name for name, entry in reader.entries.items() if entry.dtype in _FP8}
    orphans = [name for name, weight in scales.items() if name.endswith(_WEIGHT_SCALES) and weight not in coded]
    problems = [
        f"missing scale: {name} is {_dtype_name(entry)} and has none"
        for name, entry in reader.entries.items()
        if name in coded and name not in by_weight
    ]
    problems += [f"unused scale: {name} goes with no FP8 weight" for name in orphans]
    problems += [f"unknown scheme: {row.name}'s scale has shape {row.scale_shape}" for row in rows if row.scheme == "?"]
    layout, more = _check_architecture(Path(path), reader, set(orphans))
    if layout is not None:
        odd = [row.name for row in rows if row.scheme == "?"]
        more += _misfits(reader, layout, {w: s for w, s in by_weight.items() if w not in odd and s not in orphans})
    return CheckpointReport(
        dialect=layout.dialect if layout else "unknown",
        layout=layout,
        rows=rows,
        modules=_modules(reader, rows, by_weight),
        kv_scales=dict(Counter(_numberless(name) for name in kv_scales.find_names(reader.entries).all)),
        problems=problems + more,
        record=record.read(Path(path)),
    )


def _is_scale(name: str) -> bool:
    return name.endswith((*_WEIGHT_SCALES, *_INPUT_SCALES, *_OTHER_SCALES))


def _weight_of(scale: str, reader: SafetensorsReader) -> str | None:
    """The weight that a weight scale belongs to, None for other scales and for orphans."""
    suffix = next((suffix for suffix in _WEIGHT_SCALES if scale.endswith(suffix)), None)
    weight = "" if suffix is None else scale.removesuffix(suffix) + "weight"
    return weight if weight in reader.entries else None


def _declared_weight(path: Path) -> Scaling | None:
    """The scaling of weights that config.json declares; None without one that octavo reads."""
    if not (path / CONFIG_FILE).is_file():
        return None
    try:
        return read_layout(path, read_config(path)).weight
    except CheckpointError:
        return None  # _check_architecture says why


def _row(entry: TensorEntry, scale: TensorEntry | None, is_scale: bool, declared: Scaling | None) -> TensorRow:
    if is_scale:
        scheme = "scale"
    elif entry.dtype in _FP8:
        scheme = _scheme(entry.shape, scale.shape, declared) if scale else "no scale"
    else:
        scheme = _HIGH_PRECISION
    scale_shape = scale.shape if scale and entry.dtype in _FP8 else None
    return TensorRow(entry.name, _dtype_name(entry), entry.shape, scheme, scale_shape, entry.num_bytes)


def _scheme(shape: tuple[int, ...], scale_shape: tuple[int, ...], declared: Scaling | None) -> str:
    """The block shape that a scale's shape says, "?" where it fits none.

    One shape may say several: a single scale of a weight no larger than a block is what config.json declares.
    """
    if declared is not None and len(shape) == 2 and scale_shape in scale_shapes(declared, shape):
        return declared.kind
    if torch.Size(scale_shape).numel() == 1:
        return "per_tensor"
    if len(shape) != 2 or scale_shape in ((shape[0],), (shape[0], 1)):
        return "per_row" if len(shape) == 2 else "?"
    for block in ((128, 128), (1, 128), (1, 32)):
        rows, cols = (-(-size // step) for size, step in zip(shape, block, strict=True))
        if scale_shape in ((rows, cols), (rows, 1, cols, 1)):
            return f"block_{block[0]}x{block[1]}"
    return "?"


def _dtype_name(entry: TensorEntry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _modules(reader: SafetensorsReader, rows: list[TensorRow], by_weight: dict[str, str]) -> list[ModuleRow]:
    """The linears by name and format."""
    found: Counter[tuple[str, str, str, str | None, str | None]] = Counter()
    for row in rows:
        if not row.name.endswith(".weight") or len(row.shape) != 2:
            continue
        module = row.name.removesuffix(".weight")
        inputs = (reader.entries.get(f"{module}.{suffix}") for suffix in _INPUT_SCALES)
        scale, input_scale = reader.entries.get(by_weight.get(row.name, "")), next(filter(None, inputs), None)
        names = (_dtype_name(entry) if entry else None for entry in (scale, input_scale))
        found[(_numberless(module), row.scheme, row.dtype, *names)] += 1  # type: ignore[index]
    return [ModuleRow(name, count, *how) for (name, *how), count in found.items()]  # type: ignore[arg-type]


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _check_architecture(path: Path, reader: SafetensorsReader, orphans: set[str]) -> tuple[Layout | None, list[str]]:
    """What the checkpoint declares, and what its tensors lack against that."""
    if not (path / CONFIG_FILE).is_file():
        return None, [] if path.is_file() else [f"no {CONFIG_FILE} beside the tensors"]
    try:
        fields = read_config(path)
        layout, config = read_layout(path, fields), ModelConfig.from_hf(fields)
    except CheckpointError as error:
        return None, [str(error)]
    parameters = parameter_names(config)
    try:
        found = find_problems(reader, parameters, layout)
    except CheckpointError as error:
        return layout, [str(error)]
    shapes = {name: shape for p in parameters for name, shape in p.part_shapes.items()}
    problems = [f"missing {'tensor' if name in shapes else 'scale'}: {name}" for name in found.missing]
    problems += [
        f"wrong shape: {name} is {entry.shape}, config.json asks for {shapes[name]}"
        for name, entry in reader.entries.items()
        if shapes.get(name, entry.shape) != entry.shape
    ]
    problems += [
        f"wrong dtype: {name} is {_dtype_name(entry)}, which no weight may be"
        for name, entry in reader.entries.items()
        if name in shapes and entry.dtype not in (*bf16.DTYPES, *_FP8)
    ]
    inputs = (find_scale(reader.entries, name, layout.input_scale) for name in shapes if name.endswith(".weight"))
    misfits = [p for name in inputs if name for p in input_scale_misfits(reader.entries[name], layout)]
    problems += [f"wrong scale: {problem}" for problem in (*misfits, *kv_scales.misfits(reader, config))]
    unused = [name for name in found.unused if name not in orphans]
    return layout, problems + [f"unused {'scale' if _is_scale(name) else 'tensor'}: {name}" for name in unused]


def _misfits(reader: SafetensorsReader, layout: Layout, by_weight: dict[str, str]) -> Iterator[str]:
    """Scales that are there and are not what the dialect has."""
    for weight, name in by_weight.items():
        if layout.weight is None or not name.endswith(layout.weight_scale):
            continue
        scale, codes = reader.entries[name], reader.entries[weight]
        allowed = scale_shapes(layout.weight, codes.shape)
        if codes.dtype != layout.weight.dtype:
            yield f"wrong dtype: {weight} is {_dtype_name(codes)}, which {layout.dialect} codes are not"
        if scale.shape not in allowed:
            yield f"wrong shape: {name} is {scale.shape}, {layout.dialect} asks for {allowed[0]}"
        if scale.dtype not in layout.scale_dtypes:
            yield f"wrong dtype: {name} is {_dtype_name(scale)}, which {layout.dialect} scales are not"
        if layout.is_ignored(weight.removesuffix(".weight")):
            yield f"wrong config: {weight} holds FP8 codes, but {CONFIG_FILE} keeps its module out of FP8"
