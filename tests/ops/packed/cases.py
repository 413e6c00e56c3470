"""Buffers as tests of several files make them."""

import torch


def buffer(num_pieces: int, num_blocks: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of pieces that end at multiples of 16 bytes, as views of one buffer; all of them NaN."""
    num_bytes = num_blocks * 132 + -num_blocks * 132 % 16
    made = torch.full((num_pieces, num_bytes), 0x7F, dtype=torch.uint8, device=device)
    made[:, num_blocks * 128 :] = 0xFF
    codes = made[:, : num_blocks * 128].unflatten(1, (num_blocks, 128)).view(torch.float8_e4m3fn)
    return codes, made[:, num_blocks * 128 : num_blocks * 132].view(torch.float32)
