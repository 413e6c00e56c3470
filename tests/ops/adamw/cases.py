"""Parameters, gradients and fresh state for the tests of the AdamW op."""

import itertools

import torch

from octavo.ops.adamw import BLOCK, STATE_DTYPES
from octavo.testing import generate

MODES = [
    (param, state, master)
    for param, state in itertools.product((torch.bfloat16, torch.float32), STATE_DTYPES)
    for master in (("fp32", "remainder", None) if param == torch.bfloat16 else (None,))
]
BETAS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def mode_id(mode: tuple[torch.dtype, str, str | None]) -> str:
    return f"{str(mode[0]).removeprefix('torch.')}-{mode[1]}-{mode[2]}"


def make_case(
    mode: tuple[torch.dtype, str, str | None], shape: tuple[int, ...], device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, torch.Tensor]:
    """The tensors that adamw_step_ updates, by argument name, before the first step."""
    dtype, state, master = mode
    param = generate("normal", shape, dtype, seed, str(device))
    case = {
        "param": param,
        "exp_avg": torch.zeros(shape, dtype=STATE_DTYPES[state], device=device),
        "exp_avg_sq": torch.zeros(shape, dtype=torch.uint8 if state == "fp8" else STATE_DTYPES[state], device=device),
    }
    if state == "fp8":
        num_blocks = -(-param.numel() // BLOCK)
        case |= {name: torch.zeros(num_blocks, device=device) for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    if master:
        case["master"] = param.float() if master == "fp32" else torch.zeros(shape, dtype=torch.int16, device=device)
    return case


def make_hyper(step: int, grad_scale: float = 1.0, device: str | torch.device = "cpu") -> torch.Tensor:
    """hyper of step number `step` at lr 0.01 and weight decay 0.1."""
    columns = [1 - 0.01 * 0.1, 0.01 / (1 - 0.9**step), (1 - 0.95**step) ** -0.5, grad_scale, step]
    return torch.tensor(columns, dtype=torch.float32, device=device)
