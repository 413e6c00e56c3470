"""A checkpoint's weights as its files hold them, checked against the architecture: nothing missing, nothing unused."""

import dataclasses
import fnmatch
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import bf16, kv_scales, scaled_weight
from octavo.models.checkpoint.dialects import read_config, read_layout
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.checkpoint.layout import Layout
from octavo.models.checkpoint.names import ParameterNames, is_ignored, parameter_names
from octavo.models.checkpoint.safetensors_io import Place, SafetensorsReader
from octavo.models.config import ModelConfig
from octavo.nn import DELAYED_BUFFERS
from octavo.nn.weights.slices import Slices
from octavo.numerics import QuantizedTensor

Part = torch.Tensor | QuantizedTensor
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NUM_NAMED = 4  # names in an error's text


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Every parameter of a checkpoint; values are read when they are asked for, names were checked.

    Attributes:
        config: the architecture.
        layout: the dialect, and what it declares.
        reader: the files.
        input_scales: octavo's name of a linear -> [1] fp32, the known decode scale of its input; the largest where
            q, k and v (gate and up) have scales of their own, for they see one input.
        kv_scales: one a layer, or none.
    """

    config: ModelConfig
    layout: Layout
    reader: SafetensorsReader
    input_scales: dict[str, torch.Tensor]
    kv_scales: tuple[KVScales, ...]

    def read(
        self, parameter: ParameterNames, device: torch.device | str = "cpu", slices: Slices | None = None
    ) -> list[Part | None]:
        """What the files hold of a parameter, q, k and v (gate and up) apart; None for what is missing by permission.

        Args:
            slices: the share of it that is read, in whole blocks where it is codes; None for all.
        Raises:
            CheckpointError: a part of another shape or dtype, or not finite; codes without a scale.
        """
        places = [None] * len(parameter.parts) if slices is None else slices.of_parts()
        return _read_parts(self.reader, parameter, self.layout, device, places)

    def num_bytes(self, parameter: ParameterNames) -> int:
        """What a whole parameter takes in the files, scales aside."""
        entries = self.reader.entries
        return sum(entries[name].num_bytes for name, _ in parameter.parts if name in entries)

    def is_quantized(self, parameter: ParameterNames) -> bool:
        """Whether all of a parameter is there as codes; by headers alone."""
        return all(self.is_coded(name) for name, _ in parameter.parts)

    def is_coded(self, name: str) -> bool:
        """Whether a tensor of the files is there as codes."""
        return name in self.reader.entries and is_coded(self.reader, name, self.layout)

    @property
    def dtype(self) -> torch.dtype:
        """What a decoder of these weights computes in: fp32 where the embedding is stored so, else bf16."""
        embedding = parameter_names(self.config)[0].parts[0][0]
        entry = self.reader.entries.get(embedding)
        return torch.float32 if entry is not None and entry.dtype == torch.float32 else torch.bfloat16


def read_stored(
    path: str | Path, *, allow_unused: Collection[str] = (), allow_missing: Collection[str] = ()
) -> StoredWeights:
    """Open a checkpoint directory and check its names.

    Args:
        allow_unused: Hugging Face names of tensors, scales too, that may be left over; with wildcards.
        allow_missing: the same of tensors that may be lacking. The scale of a weight may never be lacking.
    Raises:
        CheckpointError: an architecture or dialect that octavo does not read; damaged files; a tensor or scale
            missing or left over. The text names it; StoredWeights.read says what is wrong with a tensor's values.
    """
    fields = read_config(path)
    layout = read_layout(path, fields)
    config = ModelConfig.from_hf(fields)
    reader = SafetensorsReader(path)
    parameters = parameter_names(config)
    problems = find_problems(reader, parameters, layout)
    _refuse(reader.path, "missing", problems.missing, allow_missing, "allow_missing")
    _refuse(reader.path, "unused", problems.unused, allow_unused, "allow_unused")
    if config.tie_word_embeddings and _HEAD in reader.entries:
        _check_tied_head(reader)
    input_scales = _read_input_scales(reader, parameters, layout)
    if state := [name for name in reader.entries if _is_fp8_state(name)]:
        warnings.warn(
            f"{reader.path}: {len(state)} tensors of delayed scaling's state are left out, such as {state[0]}: they "
            "are of another model's linears. The state begins with scales of 1; or load it into the model that was "
            "saved, with octavo.nn.load_fp8_state_dict",
            stacklevel=4,
        )
    return StoredWeights(config, layout, reader, input_scales, kv_scales.read(reader, config))


@dataclasses.dataclass(frozen=True)
class NameProblems:
    """Tensors and scales that the architecture and the dialect ask for and the files lack, and the other way round."""

    missing: list[str]
    unused: list[str]


def find_problems(reader: SafetensorsReader, parameters: list[ParameterNames], layout: Layout) -> NameProblems:
    """Compare the files' names with those that are expected; by headers alone.

    A weight scale that is missing is not among them: reading the weight says so.
    """
    expected = {name for p in parameters for name, _ in p.parts}
    weights = {name for p in parameters if _may_be_quantized(p) for name, _ in p.parts}
    scales, lost = set(), []
    for name in (name for name in sorted(weights) if name in reader.entries and layout.weight is not None):
        scales |= {s for s in scaled_weight.scale_names(name, layout.weight_scale) if s in reader.entries}
        if not is_coded(reader, name, layout) or layout.input != "static":
            continue
        found = scaled_weight.find_scale(reader.entries, name, layout.input_scale)
        scales |= {found} if found else set()
        lost += [] if found else [scaled_weight.scale_names(name, layout.input_scale)[0]]
    attention = kv_scales.attention_modules(parameters)
    kv_names = kv_scales.find_names(reader.entries, len(attention))
    known = expected | scales | kv_names.all | {_HEAD}
    missing = [name for name in expected if name not in reader.entries]
    missing += [*lost, *kv_scales.missing_names(kv_names, layout, attention)]
    unused = [name for name in reader.entries if name not in known and not (is_ignored(name) or _is_fp8_state(name))]
    return NameProblems(missing, unused)


def _is_fp8_state(name: str) -> bool:
    """Whether a tensor is delayed scaling's state, which older converted models saved among their weights."""
    return name.endswith(DELAYED_BUFFERS)


def is_coded(reader: SafetensorsReader, name: str, layout: Layout) -> bool:
    """Whether the file holds a tensor as the layout's codes."""
    return layout.weight is not None and reader.entries[name].dtype == layout.weight.dtype


def _may_be_quantized(parameter: ParameterNames) -> bool:
    """Linears, and the head, which octavo decodes."""
    return parameter.is_linear_weight or parameter.name == _HEAD


def _read_parts(
    reader: SafetensorsReader,
    parameter: ParameterNames,
    layout: Layout,
    device: torch.device | str,
    places: Sequence[Place | None],
) -> list[Part | None]:
    """What the file holds of a parameter; None for what is missing by permission."""
    parts: list[Part | None] = []
    for (name, shape), place in zip(parameter.part_shapes.items(), places, strict=True):
        if name not in reader.entries:
            parts.append(None)
        elif layout.weight is not None and _may_be_quantized(parameter):
            parts.append(scaled_weight.read(reader, name, shape, layout, device, place))
        else:
            parts.append(bf16.read(reader, name, shape, device, place))
    return parts


def _read_input_scales(
    reader: SafetensorsReader, parameters: list[ParameterNames], layout: Layout
) -> dict[str, torch.Tensor]:
    """Linears of which every part is quantized and has the scale of its input."""
    scales: dict[str, torch.Tensor] = {}
    if layout.input != "static":
        return scales
    for parameter in (p for p in parameters if p.is_linear_weight):
        scale = scaled_weight.shared_input_scale(reader, (name for name, _ in parameter.parts), layout)
        if scale is not None:
            scales[parameter.name.removesuffix(".weight")] = scale
    return scales


def _refuse(path: Path, what: str, names: Iterable[str], allowed: Collection[str], remedy: str) -> None:
    """Raise unless every name is allowed; by its name or a pattern with wildcards."""
    left = sorted(name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed))
    if left:
        more = f" and {len(left) - _NUM_NAMED} more" if len(left) > _NUM_NAMED else ""
        raise CheckpointError(
            f"{path}: {what} tensors: {', '.join(left[:_NUM_NAMED])}{more}; the files do not fit config.json's "
            f"architecture and quantization (name them in {remedy} to load all the same)"
        )


def _check_tied_head(reader: SafetensorsReader) -> None:
    head, embedding = reader.load(_HEAD), reader.load(_EMBEDDING)
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not torch.equal(head, embedding):
        raise CheckpointError(
            f"{reader.path}: {_HEAD} differs from {_EMBEDDING}, but config.json has tie_word_embeddings = true; "
            "set it to false"
        )
