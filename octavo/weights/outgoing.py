"""OutgoingWeights: the policy as the tensors that a remote engine gets, by the names of a checkpoint."""

import dataclasses

import torch

from octavo.models import Decoder
from octavo.models.save import checkpoint_tensors
from octavo.weights.audit import audit_weights
from octavo.weights.manifest import tensor_sha256

FP8_BLOCK, BF16 = "fp8-block", "bf16"


def choose_dialect(wanted: str, source: Decoder) -> str:
    """ "fp8-block" or "bf16": as engine.weights says, or for "auto" the sampler's recipe."""
    if wanted != "auto":
        return wanted
    weight = source.numerics.recipe.weight
    return FP8_BLOCK if weight is not None and weight.kind == "block_128x128" else BF16


@dataclasses.dataclass(frozen=True)
class OutgoingWeights:
    """What is sent.

    Attributes:
        source: the policy.
        dialect: "fp8-block" (codes and raw [ceil(N/128), ceil(K/128)] fp32 scales named `weight_scale_inv`; linears
            whose sizes are no multiples of 128 stay in bf16) or "bf16".
        tensors: by Hugging Face's names; they share the policy's storage where they can.
    """

    source: Decoder
    dialect: str
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, source: Decoder, dialect: str) -> "OutgoingWeights":
        """The policy's tensors; codes are those that it computes with where its recipe has such blocks."""
        tensors, _ = checkpoint_tensors(source, dialect)
        return cls(source, dialect, tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def scale_format(self) -> str:
        """ "fp32" or "e8m0": of the scales that the codes were made with."""
        weight = self.source.numerics.recipe.weight
        return "fp32" if weight is None else weight.scale_format

    def audit(self) -> None:
        """Compare with the policy.

        Raises:
            WeightAuditError: the two differ.
        """
        audit_weights(self.source, self.tensors, self.tensors.__getitem__, scale_format=self.scale_format)

    def checksums(self) -> dict[str, str]:
        """SHA-256 in hex of each tensor's bytes."""
        return {name: tensor_sha256(tensor) for name, tensor in self.tensors.items()}
