"""Counters by which the last of several programs knows that it is the last."""

import torch

_counters: dict[tuple[torch.device, int, int], torch.Tensor] = {}  # for good: a CUDA graph may hold their addresses


def arrivals_of(device: torch.device, num: int) -> torch.Tensor:
    """[num] int32 zeros, which a kernel leaves at 0; every stream, whose launches overlap, has its own."""
    is_gpu = device.type == "cuda"
    key = (device, torch.cuda.current_stream(device).cuda_stream if is_gpu else 0, num)
    counters = _counters.get(key)
    if counters is None:
        counters = torch.zeros(num, dtype=torch.int32, device=device)
        if not (is_gpu and torch.cuda.is_current_stream_capturing()):  # else a CUDA graph makes the zeros each time
            _counters[key] = counters
    return counters
