"""CodesOnly: a weight of which there are codes alone, loaded for inference or frozen under LoRA."""

from collections.abc import Callable

import torch

from octavo.errors import RecipeError
from octavo.nn.weights.operands import Operands, join_ranges, moved_device, name_tensors, one_operand
from octavo.nn.weights.plan import LinearPlan
from octavo.nn.weights.source import WeightSource
from octavo.numerics.quantized import QuantizedTensor


class CodesOnly(WeightSource):
    """Codes that nothing makes again. They are all that there is of the weight: copies and pickles have them too."""

    def __init__(self, parts: tuple[int, ...], operands: Operands, version: int = 0) -> None:
        super().__init__(parts, version)
        self.hold(operands)

    def hold(self, operands: Operands) -> None:
        """Let these be the codes."""
        self._forward, self._whole = join_ranges(operands) if self.has_whole else (operands, None)

    def held(self) -> Operands:
        """The codes, shared."""
        return self._forward

    @property
    def device(self) -> torch.device:
        return self._forward[0][1].scale.device

    def forward(self, weight: torch.Tensor | None, plan: LinearPlan, *, observe: bool = False) -> Operands:
        held, recipe = self._forward[0][1].scaling, plan.recipe
        if recipe.weight is None or (held.dtype, held.block_size) != (recipe.weight.dtype, recipe.weight.block_size):
            raise RecipeError(
                f"this layer holds {held.kind} codes, recipe {recipe.name!r} wants "
                f"{recipe.weight.kind if recipe.weight else 'none'}; load the checkpoint with a recipe that fits it"
            )
        return self._forward

    def whole(self, weight: torch.Tensor | None, plan: LinearPlan, *, observe: bool = False) -> QuantizedTensor | None:
        operands = self.forward(weight, plan)
        return one_operand(operands) if self._whole is None else self._whole

    def backward(self, weight: torch.Tensor | None, plan: LinearPlan, *, after: torch.Tensor | None = None) -> Operands:
        """See WeightSource: square blocks are transposed, at every call."""
        return [(rows, q.t()) for rows, q in self._square(weight, plan)]

    def _square(self, weight: torch.Tensor | None, plan: LinearPlan) -> Operands:
        """The codes, for a backward that transposes them.

        Raises:
            RecipeError: blocks that are not square.
        """
        scaling = plan.recipe.weight
        assert scaling is not None, f"recipe {plan.recipe.name!r} quantizes no weight"
        if not scaling.is_square:
            raise RecipeError(
                f"this layer holds {scaling.kind} codes only, and a backward with such scales needs the "
                "high-precision weight; load the checkpoint for training, or use 'blockwise'"
            )
        return self.forward(weight, plan)

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return name_tensors(self._forward, self._whole)

    def move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow Module._apply to another device; a change of dtype leaves codes alone."""
        device = moved_device(fn, self._forward[0][1].scale)
        if device != self._forward[0][1].device:
            self.hold([(rows, q.to(device)) for rows, q in self._forward])
