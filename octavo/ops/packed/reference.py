"""Ground truth of the ops on pieces of blocks. Device-free torch."""

import math

import torch
from torch.nn.functional import pad

from octavo.numerics.quantized import quantize_reference
from octavo.numerics.scaling import Scaling
from octavo.numerics.stochastic import random_bits
from octavo.ops.adamw.state import encode_first

BLOCK = 128
SCALING = Scaling.block_1x128()


def quantize_pieces(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor | None) -> None:
    """x [P, n] into codes [P, B, 128] and scales [P, B]; the residual in place."""
    values = x if residual is None else x.float() + residual
    blocks = _as_blocks(values)
    q = quantize_reference(blocks, SCALING)
    codes.copy_(q.qdata.view(codes.shape))
    scales.copy_(_marked(q.scale, blocks).view(scales.shape))
    if residual is not None:
        residual.copy_(_finite(values - _decoded(codes, scales, values.shape[1])))


def round_pieces(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, start: int) -> None:
    """x [P, n] into codes [P, B, 128] and scales [P, B]."""
    blocks = _as_blocks(x.float())
    is_finite = blocks.isfinite().all(dim=-1, keepdim=True)
    rounded, scale = encode_first(
        torch.where(is_finite, blocks, 0.0), _as_blocks(random_bits(x.numel(), seed, start).view(x.shape))
    )
    codes.copy_(rounded.view(codes.shape))
    scales.copy_(_marked(scale, blocks).view(scales.shape))


def requantize_pieces(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out_codes: torch.Tensor,
    out_scales: torch.Tensor,
    average: bool,
    residual: torch.Tensor | None,
) -> None:
    """The sum of all pieces into one piece of codes and scales; the residual in place."""
    total = _sum(codes, scales)
    if average:  # tensor / tensor: torch multiplies by a number's reciprocal on a GPU
        total /= torch.full((), len(codes), dtype=torch.float32, device=codes.device)
    total = total.view(1, -1)
    quantize_pieces(total, out_codes, out_scales, None)
    if residual is not None:
        lost = _finite(total - _decoded(out_codes, out_scales, total.shape[1]))[:, : residual.shape[1]]
        residual.copy_(residual.float() + lost * (len(codes) if average else 1))


def decode_pieces(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Pieces, or sums of neighbouring ones, into out [Q, n]."""
    num_summed = len(codes) // len(out)
    for index, piece in enumerate(out):
        chosen = slice(index * num_summed, (index + 1) * num_summed)
        piece.copy_(_sum(codes[chosen], scales[chosen]).view(-1)[: len(piece)])


def _sum(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[B, 128] fp32."""
    total = codes[0].float() * scales[0, :, None]
    for piece, scale in zip(codes[1:], scales[1:], strict=True):
        total += piece.float() * scale[:, None]
    return total


def _decoded(codes: torch.Tensor, scales: torch.Tensor, numel: int) -> torch.Tensor:
    """[P, numel] fp32."""
    return (codes.float() * scales[:, :, None]).flatten(1)[:, :numel]


def _as_blocks(x: torch.Tensor) -> torch.Tensor:
    """[P * B, 128], zeros behind each piece."""
    return pad(x, (0, -x.shape[1] % BLOCK)).reshape(-1, BLOCK)


def _marked(scale: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """scale, NaN for each block with a NaN or an infinity: quantizers saturate infinities."""
    largest = torch.linalg.vector_norm(blocks.float(), math.inf, dim=1)  # NaN where a NaN is
    return torch.where(largest.isfinite(), scale.view(-1), torch.nan)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x, 0.0)
