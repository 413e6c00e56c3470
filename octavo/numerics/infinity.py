"""A flag a device that says that a quantized tensor held an infinity, which its codes do not show.

The contract gives an infinite amax the quant_scale 1 and saturated codes, so a GEMM's result stays finite. Quantizers
set the flag on the way; who trains reads it with the gradients' norm, once a step (docs/adr/0019).
"""

import torch

_flags: dict[torch.device, torch.Tensor] = {}


def infinity_flag(device: torch.device) -> torch.Tensor:
    """[1] int32 on a device (with its index), 0 until a quantizer sets it to 1; always the same tensor."""
    flag = _flags.get(device)
    if flag is None:
        with torch.inference_mode(False):
            flag = _flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return flag


def note_infinity(x: torch.Tensor) -> None:
    """Set the flag of x's device if x holds an infinity; waits for no GPU."""
    flag = infinity_flag(x.device)
    flag |= x.detach().isinf().any()


def take_infinity(device: torch.device) -> torch.Tensor:
    """Whether a quantizer on this device met an infinity since the last call: an fp32 scalar, 1.0 or 0.0; clears it.

    Neither waits for the GPU; the quantizers are those launched before on the current stream.
    """
    flag = infinity_flag(torch.empty(0, device=device).device)  # with its index
    found = flag[0].float()
    flag.zero_()
    return found
