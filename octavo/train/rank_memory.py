"""What a rank of a sharded run holds beside its shards: units that FSDP2 has gathered, gradients on their way."""

import dataclasses
import math
from typing import TYPE_CHECKING, Self

import torch

from octavo.distributed.mesh import Mesh
from octavo.env import torchrun_place
from octavo.models import Decoder
from octavo.train.config import TrainConfig
from octavo.train.saved_activations import Saved

if TYPE_CHECKING:
    from octavo.parallel.fsdp import Reduction

GATHERED_ROOT, IN_FLIGHT = "root, gathered", "layers in flight"
GRADIENTS_OF_ROOT = "gradients of the root"
REDUCED_LAYER, REDUCED_ROOT = "reduction of a layer", "reduction of the root"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is spread over ranks.

    Attributes:
        num_ranks: of the run.
        num_shards: ranks that a parameter is cut over.
        has_fp32_shards: what is sharded are fp32 masters, gathered in the run's dtype.
    """

    num_ranks: int
    num_shards: int
    has_fp32_shards: bool

    @classmethod
    def of_config(cls, config: TrainConfig) -> Self:
        """torchrun's ranks, or else as many as [parallel] gives degrees.

        Raises:
            ConfigError: the degrees do not explain torchrun's ranks.
        """
        parallel, place = config.parallel, torchrun_place()
        if place is None:
            num_shards = max(parallel.data_parallel_shard_degree, 1)  # "all that are left" is this process
            replicas = parallel.data_parallel_replicate_degree
        else:
            replicas, num_shards = parallel.degrees(place.world_size)
        num_ranks = replicas * num_shards
        return cls(num_ranks, num_shards, num_ranks > 1 and config.optimizer.master_weights == "fp32")

    def own_share(self, num_params: int) -> int:
        """Of so many parameters, those on a rank."""
        return math.ceil(num_params / self.num_shards)

    def own_micro_batches(self, num_micro_batches: int) -> int:
        """Of a step's micro-batches, those of a rank; ConfigError as the run itself would."""
        mesh = Mesh(0, self.num_ranks, self.num_ranks // self.num_shards, self.num_shards, torch.device("cpu"))
        return len(mesh.own_share(num_micro_batches))

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the parameters that a rank keeps."""
        return torch.float32 if self.has_fp32_shards else dtype


def held_by_fsdp(model: Decoder, layout: Layout, num_code_bytes: int, reduction: "Reduction") -> list[Saved]:
    """What is held at the worst moment of each kind; not all of it at once.

    Args:
        num_code_bytes: of all linears, both ways.
    """
    size, dtype, shards = model.dtype.itemsize, _name(model.dtype), layout.num_shards
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    root, layer = model.num_params - sum(of_layers), max(of_layers)
    # the sum: fp32 of all pieces, then this rank's piece; in order: pieces as they are, sent and received
    of_pieces, of_sum = (2 * size, 4 / shards) if reduction == "ordered" else (4, 4 / shards)
    rows = [
        Saved(GATHERED_ROOT, dtype, root * size),
        # one that computes, with codes and gradients, and the next one's all-gather
        Saved(IN_FLIGHT, dtype, 3 * layer * size + num_code_bytes * layer // sum(of_layers)),
        Saved(GRADIENTS_OF_ROOT, dtype, root * size),
        Saved(REDUCED_LAYER, "fp32", int(layer * (of_pieces + of_sum))),
        # what was gathered is freed first
        Saved(REDUCED_ROOT, "fp32", int(root * (of_pieces + of_sum))),
    ]
    return [row for row in rows if row.num_bytes]


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32"
