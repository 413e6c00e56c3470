"""LayerNormMLP: a norm and a feed-forward block whose inner tensors exist in 8 bits, as TransformerEngine's module."""

import torch

from octavo.distributed.tensor_group import whole
from octavo.errors import ShapeError
from octavo.nn.functional.norm_mlp import norm_mlp
from octavo.nn.fusion import FusedLayer
from octavo.nn.layer_norm_linear import build_norm
from octavo.nn.linear import Linear

ACTIVATIONS = ("swiglu", "gelu")


class LayerNormMLP(FusedLayer):
    """fc2(activation(fc1(norm(x)))).

    Args:
        hidden_size: width of input and output.
        ffn_hidden_size: width between the linears.
        eps: of the norm.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm scales by 1 + weight.
        activation: "gelu" (tanh form, after fc1's bias) or "swiglu" (fc1 makes gate and up).
        bias: add biases in both linears.
        dtype: of the parameters, bf16 or fp32.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ShapeError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.norm = build_norm(normalization, hidden_size, eps, zero_centered_gamma, dtype, device)
        parts = (ffn_hidden_size,) * (2 if activation == "swiglu" else 1)
        self.fc1 = Linear(hidden_size, sum(parts), bias, parts=parts, device=device, dtype=dtype)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, device=device, dtype=dtype)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, with_stream: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [..., hidden_size] -> the same shape and dtype; residual and with_stream as in LayerNormLinear."""
        width = self.fc1.in_features
        if x.shape[-1] != width:
            raise ShapeError(f"the last dim of x must be hidden_size={width}, got shape {tuple(x.shape)}")
        flat = None if residual is None else residual.reshape(-1, width)
        modules = (self.norm, self.fc1, self.fc2)
        found, stream = norm_mlp(x.reshape(-1, width), flat, *modules, self.activation, fused=self.fuses(*modules))
        out = whole(found)
        return (out.view(x.shape), whole(stream).view(x.shape)) if with_stream else out.view(x.shape)

    def forward_residual(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As LayerNormLinear.forward_residual."""
        return self(x, residual, with_stream=True)  # type: ignore[no-any-return]
