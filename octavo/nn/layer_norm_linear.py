"""LayerNormLinear: a norm and a linear that share one FP8 tensor, as TransformerEngine's module of that name."""

import torch

from octavo.distributed.tensor_group import whole
from octavo.errors import ShapeError
from octavo.nn.functional.norm_linear import Norm, norm_linear
from octavo.nn.fusion import FusedLayer
from octavo.nn.layer_norm import LayerNorm
from octavo.nn.linear import Linear
from octavo.nn.rms_norm import RMSNorm

NORMS = ("LayerNorm", "RMSNorm")


def build_norm(
    normalization: str,
    hidden_size: int,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Norm:
    """The norm of that name.

    Raises:
        ShapeError: another name.
    """
    if normalization not in NORMS:
        raise ShapeError(f"normalization must be one of {', '.join(NORMS)}, got {normalization!r}")
    kind = LayerNorm if normalization == "LayerNorm" else RMSNorm
    return kind(hidden_size, eps, zero_centered_gamma=zero_centered_gamma, dtype=dtype, device=device)


class LayerNormLinear(FusedLayer):
    """linear(norm(x)).

    Args:
        in_features: K.
        out_features: N.
        eps: of the norm.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm scales by 1 + weight.
        bias: add a bias [N].
        parts: row counts of fused projections (see Linear).
        dtype: of the parameters, bf16 or fp32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        parts: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.norm = build_norm(normalization, in_features, eps, zero_centered_gamma, dtype, device)
        self.linear = Linear(in_features, out_features, bias, parts=parts, device=device, dtype=dtype)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, with_stream: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [..., K] -> [..., N] of x's dtype.

        Args:
            residual: of x's shape and dtype, added to x first; None for nothing.
            with_stream: also return x + residual, which the residual stream goes on with.
        """
        width = self.linear.in_features
        if x.shape[-1] != width:
            raise ShapeError(f"the last dim of x must be in_features={width}, got shape {tuple(x.shape)}")
        flat = None if residual is None else residual.reshape(-1, width)
        modules = (self.norm, self.linear)
        out, stream = norm_linear(x.reshape(-1, width), flat, *modules, fused=self.fuses(*modules))
        out = out.view(*x.shape[:-1], self.linear.out_features)
        return (out, whole(stream).view(x.shape)) if with_stream else out

    def forward_residual(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output for x + residual, and that sum; a call of the module, so that its hooks gather its parameters."""
        return self(x, residual, with_stream=True)  # type: ignore[no-any-return]
