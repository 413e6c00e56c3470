"""TransposedLinear: what convert makes of transformers' Conv1D, a linear whose parameter is stored as [K, N]."""

import torch
from torch import nn

from octavo.nn.linear import Linear


class TransposedLinear(Linear):
    """y = x @ stored + bias under a recipe; the parameter and its key stay as Conv1D has them.

    Codes are made of the transposed weight, as a Linear's, in each forward: they are not kept from one to the next.

    Attributes:
        weight: what is stored, [K, N], as a view [N, K] through which gradients go; the parameter itself is in
            parameters() and state_dict().
    """

    @property
    def weight(self) -> torch.Tensor | None:  # type: ignore[override]
        if "weight" not in self._parameters:
            raise AttributeError("weight")
        stored = self._parameters["weight"]
        return None if stored is None else stored.t()


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
