"""Initial weights: normal with a standard deviation of 0.02, the residual projections' divided by sqrt(2 * layers)."""

import torch

from octavo.models.checkpoint.names import parameter_names
from octavo.models.config import ModelConfig

STD = 0.02
_RESIDUAL = (".o_proj.weight", ".down_proj.weight", ".fc_out.weight")


def initial_weights(config: ModelConfig, *, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """A state dict of random weights: norms one, biases zero, all else normal.

    Args:
        seed: the only source of randomness. Numbers are drawn in fp32 on the CPU, so that dtypes and devices agree.
    Returns:
        octavo's parameter name -> tensor of dtype, on the CPU.
    Source:
        GPT-2's scheme (Radford et al. 2019), section 2.3.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for parameter in parameter_names(config):
        if parameter.name.endswith("norm.weight"):
            value = torch.ones(parameter.shape)
        elif parameter.name.endswith(".bias"):
            value = torch.zeros(parameter.shape)
        else:
            scale = (2 * config.num_layers) ** -0.5 if parameter.name.endswith(_RESIDUAL) else 1.0
            value = torch.randn(parameter.shape, generator=generator) * (STD * scale)
        weights[parameter.name] = value.to(dtype)
    return weights
