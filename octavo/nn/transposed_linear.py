"""TransposedLinear: what convert makes of transformers' Conv1D, a linear whose parameter is stored as [K, N]."""

import torch
from torch import nn

from octavo.nn.linear import Linear


class TransposedLinear(Linear):
    """y = x @ weight + bias under a recipe; the parameter and its key stay as Conv1D has them.

    Codes are made of the transposed weight, as a Linear's, in each forward: they are not kept from one to the next.

    Attributes:
        weight: Parameter [K, N].
    """

    @property
    def matrix(self) -> torch.Tensor | None:
        """The weight as a view [N, K], through which gradients go."""
        return None if self.weight is None else self.weight.t()

    def forward(self, x: torch.Tensor, *, bias_to: list[torch.Tensor | None] | None = None) -> torch.Tensor:
        """Linear's, whose input is named as Conv1D names it."""
        return super().forward(x, bias_to=bias_to)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, which no import is needed for."""
    weight = module._parameters.get("weight")
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and weight is not None and weight.dim() == 2


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear, octavo's or torch's, or of a Conv1D."""
    if is_conv1d(module):
        nx, nf = module._parameters["weight"].shape  # type: ignore[union-attr]
        return int(nx), int(nf)
    return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
