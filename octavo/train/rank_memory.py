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

GATHERED_ROOT, HEAD_GRADIENT = "root, gathered", "gradient of the head"
IN_FLIGHT, ON_THEIR_WAY = "layers in flight", "gradients on their way"
REDUCED_LAYER, REDUCED_ROOT = "reduction of a layer", "reduction of the root"


@dataclasses.dataclass(frozen=True)
class RankShare:
    """How a run is spread over ranks.

    Attributes:
        num_ranks: of the run, those of one tensor group counted once.
        num_shards: ranks that share a parameter, or a slice of it.
        has_fp32_shards: what is sharded are fp32 masters, gathered in the run's dtype.
        num_tensor: ranks among which each linear is cut.
    """

    num_ranks: int
    num_shards: int
    has_fp32_shards: bool
    num_tensor: int = 1

    @classmethod
    def of_config(cls, config: TrainConfig) -> Self:
        """torchrun's ranks, or else as many as [parallel] gives degrees.

        Raises:
            ConfigError: the degrees do not explain torchrun's ranks.
        """
        parallel, place = config.parallel, torchrun_place()
        num_tensor = parallel.tensor_parallel_degree
        if place is None:
            num_shards = max(parallel.data_parallel_shard_degree, 1)  # "all that are left" is this process
            replicas = parallel.data_parallel_replicate_degree
        else:
            replicas, num_shards, num_tensor = parallel.degrees(place.world_size)
        num_ranks = replicas * num_shards
        return cls(num_ranks, num_shards, num_ranks > 1 and config.optimizer.master_weights == "fp32", num_tensor)

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


def held_by_fsdp(model: Decoder, layout: RankShare, num_code_bytes: int, reduction: "Reduction") -> list[Saved]:
    """What torch 2.11 to 2.13 hold at some moment of a step; not all of it at once.

    Args:
        num_code_bytes: of all linears, both ways.
    """
    size, dtype, shards = model.dtype.itemsize, _name(model.dtype), layout.num_shards
    root, layer, of_layers = _split(model)
    head = model.head_weight.numel()
    # pieces are sent in fp32 and summed by the backend; or as they are, received, and added to the sum in order
    sent, received = (size, size) if reduction == "ordered" else (4, 0)
    summed = 4 / shards
    # of an fp32 shard the sum is its gradient, which is counted already
    of_root = root * (sent + received + (0 if layout.stored_dtype(model.dtype) == torch.float32 else summed))
    return [
        Saved(GATHERED_ROOT, dtype, root * size),
        Saved(HEAD_GRADIENT, dtype, head * size),
        # one that computes, with codes and gradients, and the next one's all-gather
        Saved(IN_FLIGHT, dtype, 3 * layer * size + num_code_bytes * layer // of_layers),
        # of the layer before, until it comes to send its own
        Saved(ON_THEIR_WAY, _name(torch.float32 if sent == 4 else model.dtype), layer * sent),
        Saved(REDUCED_LAYER, "fp32", int(layer * (size + sent + received + summed))),
        # the last parameter's gradient lives as long as that
        Saved(REDUCED_ROOT, "fp32", int(of_root) + head * size),
    ]


def late_gradients(model: Decoder) -> int:
    """Parameters whose sharded gradients are not there when the backward of layers holds most: the root's, and those
    of the last two layers that it comes to.
    """
    root, layer, of_layers = _split(model)
    return root + min(2 * layer, of_layers)


def _split(model: Decoder) -> tuple[int, int, int]:
    """Parameters of the root, of the largest layer, of all layers."""
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    return sum(p.numel() for p in model.parameters()) - sum(of_layers), max(of_layers), sum(of_layers)


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32"
