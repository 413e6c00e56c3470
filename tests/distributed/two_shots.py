"""The two-shot formula of FP8 reductions in plain torch."""

import torch


def as_blocks(x: torch.Tensor, multiple: int = 128) -> torch.Tensor:
    """[blocks, 128], padded with zeros to a multiple of elements."""
    flat = x.reshape(-1)
    return torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)]).view(-1, 128)


def rounded(blocks: torch.Tensor) -> torch.Tensor:
    """E4M3 and back with a scale a block of 128; NaN where the block has a NaN or an infinity. Ordinary sizes only."""
    wide = blocks.float()
    amax = wide.abs().amax(dim=1, keepdim=True)
    factor = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)
    decoded = (wide * factor).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * (torch.ones_like(factor) / factor)
    return torch.where(amax.isfinite(), decoded, torch.nan)


def sum_in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One after the other in fp32."""
    total = tensors[0].float().clone()
    for tensor in tensors[1:]:
        total += tensor.float()
    return total


def two_shots(inputs: list[torch.Tensor], average: bool = False) -> torch.Tensor:
    """What an all-reduce of these ranks' tensors must give, in their shape and dtype."""
    world, first = len(inputs), inputs[0]
    total = sum_in_order([rounded(as_blocks(x, 128 * world)) for x in inputs])
    if average:
        total = total / torch.tensor(float(world))
    return rounded(total).view(-1)[: first.numel()].view(first.shape).to(first.dtype)
