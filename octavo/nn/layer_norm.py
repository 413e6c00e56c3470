"""LayerNorm as a module: octavo's norm kernels; in exact mode on a CPU the order-free op."""

import torch
from torch import nn

from octavo.distributed.tensor_group import TensorGroup
from octavo.nn.fusion import fusable
from octavo.nn.rms_norm import apply_norm, initial_gamma, shared


@fusable
class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim.

    Args:
        hidden_size: size of the last dim.
        eps: added to the variance.
        bias: add one.
        zero_centered_gamma: multiply by 1 + weight; weight then starts at zero.
        dtype: of weight and bias.

    Attributes:
        tensor_group: as RMSNorm's.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        zero_centered_gamma: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial_gamma(hidden_size, zero_centered_gamma, dtype, device))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device)) if bias else None
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.exact = False
        self.tensor_group: TensorGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        weight = shared(self.weight, self.tensor_group)
        bias = None if self.bias is None else shared(self.bias, self.tensor_group)
        return apply_norm(x, weight, bias, self.eps, "layer_norm", self.zero_centered_gamma, self.exact)
