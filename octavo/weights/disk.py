"""Weights as a checkpoint in a folder that trainer and engine both see, read back and audited before use."""

import shutil
from pathlib import Path

from octavo.models import Decoder, save_model
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.models.tokenizer import Tokenizer
from octavo.weights.audit import audit_weights
from octavo.weights.errors import WeightAuditError
from octavo.weights.outgoing import OutgoingWeights
from octavo.weights.update import tensor_sha256


class DiskStage:
    """One version's checkpoint, under a name of its own.

    Args:
        folder: seen by both sides under this path; made where it is missing. label: of the version.

    Attributes:
        path: the checkpoint's, absolute. num_bytes: of its tensors.
        checksums: name -> SHA-256 in hex of what the trainer has, and the files too after `write`.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.path = folder.resolve() / label
        self.num_bytes = 0
        self.checksums: dict[str, str] = {}

    def write(self, source: Decoder, dialect: str, tokenizer: Tokenizer) -> None:
        """Write the policy, read the files back, and audit what they hold.

        Raises:
            WeightAuditError: a file's bytes are not those of the policy's tensors. CheckpointError: nothing could be
                written or read.
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
