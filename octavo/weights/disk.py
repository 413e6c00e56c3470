"""Weights as a checkpoint in a folder that both sides see: written and audited there, staged from there."""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.models import Decoder, ModelConfig, save_model
from octavo.models.checkpoint import record
from octavo.models.checkpoint.dialects import read_config, read_layout
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.models.tokenizer import Tokenizer
from octavo.weights.audit import audit_weights
from octavo.weights.errors import WeightAuditError
from octavo.weights.manifest import manifest_of, tensor_sha256
from octavo.weights.outgoing import OutgoingWeights
from octavo.weights.update import WeightUpdate


class DiskStage:
    """One version's checkpoint, under a name of its own.

    Args:
        folder: seen by both sides under this path; made where it is missing.
        label: of the version.

    Attributes:
        path: the checkpoint's, absolute.
        num_bytes: of its tensors.
        checksums: name -> SHA-256 in hex of what the trainer has, and the files too after `write`.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.path = folder.resolve() / label
        self.num_bytes = 0
        self.checksums: dict[str, str] = {}

    def write(self, source: Decoder, dialect: str, tokenizer: Tokenizer) -> None:
        """Write the policy, read the files back, and audit what they hold.

        Raises:
            WeightAuditError: a file's bytes are not those of the policy's tensors.
            CheckpointError: nothing could be written or read.
        """
        outgoing = OutgoingWeights.of(source, dialect)
        self.num_bytes, self.checksums = outgoing.num_bytes, outgoing.checksums()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_model(source, self.path, dialect, tokenizer)
        self.verify(source, outgoing.scale_format)

    def verify(self, source: Decoder, scale_format: str) -> None:
        """Audit the files as they lie there; see write."""
        reader = SafetensorsReader(self.path)
        audit_weights(source, reader.entries, reader.load, scale_format=scale_format)
        for name, checksum in self.checksums.items():
            if name not in reader.entries or tensor_sha256(reader.load(name)) != checksum:
                raise WeightAuditError(
                    "corrupted bytes", name, f"{self.path} does not hold the bytes that were written; look at the disk"
                )

    def remove(self) -> None:
        """Delete the checkpoint."""
        shutil.rmtree(self.path, ignore_errors=True)


def stage_checkpoint(
    model: Decoder,
    path: str | Path,
    *,
    checksums: Mapping[str, str] | None = None,
    partial: Sequence[str] = (),
    staging_device: torch.device | str | None = None,
    begin: Callable[..., WeightUpdate] | None = None,
) -> WeightUpdate:
    """A checkpoint directory as a staged update: what load_model would make of it under the model's numerics.

    Args:
        checksums: name -> SHA-256 in hex, for every tensor that is read; None for no check. The rest is as in
            WeightUpdate; with partial the files' other tensors are not read.
        begin: makes the update, as Engine.begin_update; None for a WeightUpdate of the model.
    Raises:
        CheckpointError: another architecture, damaged files, or see WeightUpdate.stage.
    """
    fields = read_config(path)
    layout = read_layout(path, fields)
    _check_config(model.config, ModelConfig.from_hf(fields), path)
    readers = [SafetensorsReader(path)]
    if model.numerics.recipe.has_state and (state := record.state_file(Path(path))) is not None:
        readers.append(SafetensorsReader(state))
    begin = begin or functools.partial(WeightUpdate, model)
    update = begin(layout=layout, partial=partial, staging_device=staging_device)
    with update.ending_at_error():  # a file that cannot be read fails apart from the update
        wants = update.staging.wants
        found = {name: reader for reader in readers for name in reader.entries if not partial or wants(name)}
        update.declare(manifest_of({name: reader.entries[name] for name, reader in found.items()}, checksums))
        for name in sorted(found, key=update.staging.position):
            update.stage(name, found[name].load(name))
    return update


def _check_config(ours: ModelConfig, theirs: ModelConfig, path: str | Path) -> None:
    fields = [f.name for f in dataclasses.fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)]
    if fields:
        name = fields[0]
        raise CheckpointError(
            f"{path}: {name} is {getattr(theirs, name)!r}, but the model that serves has {getattr(ours, name)!r}; an "
            "update brings new weights of the same architecture"
        )
