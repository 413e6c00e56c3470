"""LinearPlan: what one linear computes with in one forward and its backward, decided before either runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.distributed.token_shards import TokenShards
from octavo.errors import RecipeError
from octavo.nn.weights.delayed import DelayedState
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling

Observer = Callable[[str, torch.Tensor, QuantizedTensor | None], None]
_NOTHING_KNOWN: dict[str, Any] = {}


class LinearPlan(NamedTuple):
    """How a linear computes; the autograd Functions keep it for their backward.

    Attributes:
        recipe: in effect.
        exact: a row's output bits depend on that row alone.
        stages: delayed scaling stages amaxes (training mode), those of the backward by the mode of the forward.
        saves_input: keep the input itself for grad_weight, and quantize it along the tokens in the backward.
        observer: sees every operand and result; None for none. See Linear.
        state: delayed scaling's, None without.
        input_quant_scale: [1] fp32 of a recipe with static_input, None without.
        tensor_group: tensor-parallel ranks that hold slices of the linear, None where this rank holds it whole.
        cut_dim: what they have slices of: "in" (input and weight, along K), "out" (weight and output, along N).
        token_shards: the input is this rank's tokens alone, and all ranks' codes are multiplied; None for all tokens.
    """

    recipe: Recipe
    exact: bool = False
    stages: bool = True
    saves_input: bool = False
    observer: Observer | None = None
    state: DelayedState | None = None
    input_quant_scale: torch.Tensor | None = None
    tensor_group: TensorGroup | None = None
    cut_dim: str = ""
    token_shards: TokenShards | None = None

    @property
    def saved_activations(self) -> Scaling | None:
        """How fused steps keep the inputs of norms and activations: exact ones as the modules do, in high precision."""
        return None if self.exact else self.recipe.saved_activations

    def known(self, slot: int, *, observe: bool) -> dict[str, Any]:
        """A quantizer's keyword arguments for one operand: delayed scaling's scale and amax, a static scale, or none.

        Args:
            slot: DelayedState.INPUT or GRAD_OUTPUT.
        Raises:
            RecipeError: the recipe has static inputs, and there is no input scale.
        """
        if self.recipe.static_input and slot == DelayedState.INPUT:
            if self.input_quant_scale is None:
                raise RecipeError(
                    f"recipe {self.recipe.name!r} has static inputs, this layer no input_scale; set_input_scale"
                )
            return {"quant_scale": self.input_quant_scale}
        state = self.state
        if state is None:
            return _NOTHING_KNOWN
        known = state.made_known.get((slot, observe))
        if known is None:
            return state.known(slot, observe=observe)
        if observe:
            state.is_reduced = False
        return known
