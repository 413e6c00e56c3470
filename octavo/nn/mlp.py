"""Feed-forward blocks: SwiGLU (gate and up fused in one linear, then down), and GeLU between two linears."""

import torch

from octavo.distributed.tensor_group import whole
from octavo.nn.functional.norm_mlp import norm_mlp
from octavo.nn.fusion import FusedLayer, fusable
from octavo.nn.linear import Linear


@fusable
class MLP(FusedLayer):
    """down_proj(silu(gate) * up).

    Args:
        hidden_size: model width.
        intermediate_size: width of gate and of up.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parts = (intermediate_size, intermediate_size)
        self.gate_up_proj = Linear(hidden_size, sum(parts), parts=parts, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> the same shape."""
        linears = (self.gate_up_proj, self.down_proj)
        return whole(norm_mlp(x, None, None, *linears, "swiglu", fused=self.fuses(*linears))[0])


@fusable
class GeluMLP(FusedLayer):
    """fc_out(gelu(fc_in(x))), GeLU in its tanh form, with biases.

    Args:
        hidden_size: model width.
        intermediate_size: width between the linears.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.fc_in = Linear(hidden_size, intermediate_size, True, dtype=dtype, device=device)
        self.fc_out = Linear(intermediate_size, hidden_size, True, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> the same shape."""
        linears = (self.fc_in, self.fc_out)
        return whole(norm_mlp(x, None, None, *linears, "gelu", fused=self.fuses(*linears))[0])
