"""A norm and a column-parallel linear as one module, with TransformerEngine's keys: one step where that is possible."""

from typing import Any

import torch

from octavo.integrations.megatron.linear import OctavoColumnParallelLinear
from octavo.integrations.megatron.norm import make_norm
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.norm_linear import Norm, NormLinearFunction, can_fuse, norm_operands


class OctavoLayerNormColumnParallelLinear(OctavoColumnParallelLinear):
    """OctavoColumnParallelLinear of the norm of its input, with its arguments.

    The norm's output exists in FP8 alone where no ranks share the linear. Where some do, their gradients meet between
    the two, which then run one after the other.

    Attributes:
        layer_norm_weight: [K], the norm's.
        layer_norm_bias: [K]; only a LayerNorm has one.
    """

    skip_bias_add: bool
    input_size: int
    output_size: int
    output_size_per_partition: int
    bias: torch.Tensor | None

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm = make_norm(config, input_size, config.layernorm_epsilon)
        self.__dict__["norm"] = norm  # no submodule: its parameters have names here
        for name, parameter in norm.named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """input_ [S, B, K] -> ([S, B, N of this rank], the bias to add or None)."""
        norm: Norm = vars(self)["norm"]
        if not (weight is None and self._fuses(norm)):
            return super().forward(norm(input_), weight, runtime_gather_output)  # type: ignore[no-any-return]
        held, own = self.fp8, self.weight
        assert held is not None and own is not None, "asked before"
        held.follow(own)
        plan, bias = held.begin(effective_recipe(held.recipe)), None if self.skip_bias_add else self.bias
        operands = (*norm_operands(norm), own, bias, held.source, plan)
        flat = input_.reshape(-1, self.input_size)
        out, _ = NormLinearFunction.apply(flat, None, *operands, torch.is_grad_enabled())
        return out.view(*input_.shape[:-1], self.output_size), self.bias if self.skip_bias_add else None

    def _fuses(self, norm: Norm) -> bool:
        held, is_whole = self.fp8, self.output_size_per_partition == self.output_size
        if held is None or self.awaits_layer or not is_whole:
            return False
        return can_fuse(effective_recipe(held.recipe), norm, held)
