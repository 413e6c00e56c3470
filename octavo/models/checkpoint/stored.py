"""A checkpoint's weights as its files hold them, checked against the architecture: nothing missing, nothing unused."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import bf16, fp8_block
from octavo.models.checkpoint.dialects import detect_dialect, read_config
from octavo.models.checkpoint.names import ParameterNames, is_ignored, parameter_names
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.models.config import ModelConfig
from octavo.numerics import QuantizedTensor

Part = torch.Tensor | QuantizedTensor
_TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NUM_NAMED = 4  # names in an error's text


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Every parameter of a checkpoint.

    Attributes:
        config: the architecture. dialect: "bf16" or "fp8-block".
        parts: octavo's parameter name -> what the file holds of it, q, k and v (gate and up) apart. A part that is
            missing by permission is None.
    """

    config: ModelConfig
    dialect: str
    parts: dict[str, list[Part | None]]

    def codes(self, parameter: str) -> list[QuantizedTensor] | None:
        """The parameter's codes, one QuantizedTensor a part, or None unless all of it is quantized."""
        codes = [part for part in self.parts[parameter] if isinstance(part, QuantizedTensor)]
        return codes if len(codes) == len(self.parts[parameter]) else None

    @property
    def dtype(self) -> torch.dtype:
        """What a decoder of these weights computes in: fp32 where the embedding is stored so, else bf16."""
        embedding = self.parts["embed_tokens.weight"][0]
        is_fp32 = isinstance(embedding, torch.Tensor) and embedding.dtype == torch.float32
        return torch.float32 if is_fp32 else torch.bfloat16


def read_stored(
    path: str | Path, *, allow_unused: Collection[str] = (), allow_missing: Collection[str] = ()
) -> StoredWeights:
    """Read a checkpoint directory.

    Args:
        allow_unused, allow_missing: Hugging Face names of tensors that may be left over or lacking.
    Raises:
        CheckpointError: an architecture or dialect that octavo does not read; damaged files; a tensor missing, left
            over, of another shape or dtype, or not finite; codes without a scale. The text names the tensor.
    """
    fields = read_config(path)
    dialect = detect_dialect(fields)
    config = ModelConfig.from_hf(fields)
    reader = SafetensorsReader(path)
    parameters = parameter_names(config)
    _check_names(reader, parameters, dialect, allow_unused, allow_missing)
    parts = {p.name: [_read_part(reader, p, name, dialect) for name, _ in p.parts] for p in parameters}
    if config.tie_word_embeddings and _TIED_HEAD in reader.entries:
        _check_tied_head(reader)
    return StoredWeights(config, dialect, parts)


def _read_part(reader: SafetensorsReader, parameter: ParameterNames, hf_name: str, dialect: str) -> Part | None:
    if hf_name not in reader.entries:
        return None  # _check_names let it pass
    is_quantizable = dialect == "fp8-block" and parameter.is_linear_weight
    return (fp8_block if is_quantizable else bf16).read(reader, hf_name, parameter.part_shapes[hf_name])


def _check_names(
    reader: SafetensorsReader,
    parameters: list[ParameterNames],
    dialect: str,
    allow_unused: Collection[str],
    allow_missing: Collection[str],
) -> None:
    expected = {name for p in parameters for name, _ in p.parts}
    missing = [name for name in expected if name not in reader.entries and name not in allow_missing]
    weights = {name for p in parameters if p.is_linear_weight for name, _ in p.parts}
    scales = (
        {fp8_block.scale_name(name) for name in weights if name in reader.entries} if dialect == "fp8-block" else set()
    )
    known = expected | scales | {_TIED_HEAD} | set(allow_unused)
    unused = [name for name in reader.entries if name not in known and not is_ignored(name)]
    for what, names, remedy in (("missing", missing, "allow_missing"), ("unused", unused, "allow_unused")):
        if names:
            more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            raise CheckpointError(
                f"{reader.path}: {what} tensors: {', '.join(sorted(names)[:_NUM_NAMED])}{more}; the files do not fit "
                f"config.json's architecture (name them in {remedy} to load all the same)"
            )


def _check_tied_head(reader: SafetensorsReader) -> None:
    head, embedding = reader.load(_TIED_HEAD), reader.load(_EMBEDDING)
    if head.shape != embedding.shape or not torch.equal(head, embedding):
        raise CheckpointError(
            f"{reader.path}: {_TIED_HEAD} differs from {_EMBEDDING}, but config.json has tie_word_embeddings = true; "
            "set it to false"
        )
