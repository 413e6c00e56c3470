"""Ground truth of a router's logits in parts and of the routing they make. Device-free torch."""

import torch

from octavo.ops.gemm.hp_mm import hp_mm_reference
from octavo.ops.moe.reference import moe_routing_reference

NUM_PARTS = 8
WORD = 16  # columns, at which parts begin


def part_columns(K: int) -> int:
    """Columns of K that each part is the product of; the last have fewer, or none."""
    return -(-K // (NUM_PARTS * WORD)) * WORD


def router_parts_reference(x: torch.Tensor, weight: torch.Tensor, reads_ahead: bool = False) -> torch.Tensor:
    """x @ weight.t() over each of NUM_PARTS ranges of K.

    Args:
        x: [T, K].
        weight: [E, K].
        reads_ahead: changes nothing here.
    Returns:
        [NUM_PARTS, T, E] fp32.
    """
    each = part_columns(x.shape[1])
    columns = [slice(part * each, (part + 1) * each) for part in range(NUM_PARTS)]
    return torch.stack([hp_mm_reference(x[:, own], weight[:, own], None, torch.float32) for own in columns])


def route_tokens_reference(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, normalize: bool, alignment: int
) -> tuple[torch.Tensor, ...]:
    """The routing of x @ weight.t(), whatever parts it is made of; the tensors of Routing in order."""
    return moe_routing_reference(hp_mm_reference(x, weight, None, torch.float32), top_k, normalize, alignment)
