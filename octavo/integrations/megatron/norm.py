"""Megatron's norms by octavo's kernels, sequence parallelism included, which Megatron has only with Apex or others."""

from typing import Any

import torch
from torch import nn

from octavo.nn.functional.norm_linear import Norm
from octavo.nn.layer_norm_linear import build_norm


class OctavoNorm:
    """Makes the LayerNorm or RMSNorm that a TransformerConfig asks for, with the keys of Megatron's own.

    Args:
        config: a TransformerConfig.
        hidden_size: size of the last dim.
        eps: added to the variance.
    Raises:
        ShapeError: config.normalization is another one.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> nn.Module:  # type: ignore[misc]
        return make_norm(config, hidden_size, eps)


def make_norm(config: Any, hidden_size: int, eps: float) -> Norm:
    """The norm of OctavoNorm's arguments."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    centered, dtype = config.layernorm_zero_centered_gamma, config.params_dtype
    norm = build_norm(config.normalization, hidden_size, eps, centered, dtype, device)  # type: ignore[arg-type]
    for parameter in norm.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel  # Megatron adds such gradients over the ranks
    return norm
