"""Ground truth of transposing codes, in torch."""

import torch


def transpose(codes: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    """codes [M, K] uint8 -> [K, M]; see octavo.ops.quantize.transpose.transpose_codes."""
    return codes.t().contiguous()
