"""DelayedState: history and scales of delayed scaling for one linear, as the quantizers take them."""

from typing import Any

import torch

from octavo.nn.weights.operands import row_ranges
from octavo.numerics.delayed import next_quant_scale
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import block_amax

# Names of delayed scaling's buffers in a linear, and so in octavo's checkpoints.
HISTORY_BUFFER, SCALE_BUFFER = "fp8_amax_history", "fp8_quant_scale"
DELAYED_BUFFERS = (HISTORY_BUFFER, SCALE_BUFFER)


class DelayedState:
    """Histories and scales of delayed scaling for one linear: slots input, grad_output, then one a weight range.

    The tensors are the linear's own fp32 buffers; updates are in place. A linear keeps one of these for the views that
    it holds; like all derived state it is in no copy and no pickle.

    Attributes:
        history: [amax_history_len, n].
        quant_scale: [n].
        is_reduced: nothing was staged since the ranks last agreed on the largest amaxes.
        made_known: what known has returned so far.
    """

    INPUT, GRAD_OUTPUT, WEIGHT = 0, 1, 2

    def __init__(self, history: torch.Tensor, quant_scale: torch.Tensor) -> None:
        self.history, self.quant_scale = history, quant_scale
        self.is_reduced = False
        self._kept_for: object = None
        self.made_known: dict[tuple[int, bool], dict[str, Any]] = {}
        self._weight_scales: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def keep_for(self, recipe: Recipe) -> "DelayedState":
        """Take note of what is_of will ask; returns self."""
        self._kept_for = (recipe, self.history.data_ptr(), self.quant_scale.data_ptr())
        return self

    def is_of(self, history: object, quant_scale: object, recipe: Recipe) -> bool:
        """Whether it is kept for this recipe and these buffers, and they are where they were."""
        if self.history is not history or self.quant_scale is not quant_scale:
            return False
        return self._kept_for == (recipe, self.history.data_ptr(), self.quant_scale.data_ptr())

    @staticmethod
    def num_slots(parts: tuple[int, ...], recipe: Recipe) -> int:
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        return 2 + len(row_ranges(parts, recipe.weight))

    @property
    def weight_scales(self) -> torch.Tensor:
        """quant_scale of every weight range."""
        if torch.compiler.is_compiling():
            return self.quant_scale[self.WEIGHT :]
        if self._weight_scales is None:
            self._weight_scales = self.quant_scale[self.WEIGHT :]
        return self._weight_scales

    def known(self, slot: int, *, observe: bool) -> dict[str, Any]:
        """The slot's scale as a quantizer's keyword arguments; where observe is set, it stages x's amax as well."""
        if torch.compiler.is_compiling():  # traced code may change no object outside of a Function
            return self._make_known(slot, observe)
        if observe:
            self.is_reduced = False
        known = self.made_known.get((slot, observe))
        if known is None:
            known = self.made_known[slot, observe] = self._make_known(slot, observe)
        return known

    def _make_known(self, slot: int, observe: bool) -> dict[str, Any]:
        scale = {"quant_scale": self.quant_scale[slot]}
        return scale | {"amax_out": self.history[0, slot : slot + 1]} if observe else scale

    def scale_frozen_weight(self, recipe: Recipe, parts: list[torch.Tensor]) -> None:
        """A frozen weight's scales, from the weight itself: it keeps the codes made now for good.

        Trained ones start with a scale of 1, as in TransformerEngine, and have their own after the first step.
        """
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        amax = torch.cat([block_amax(part, (-1, -1)).reshape(1) for part in parts])
        scales = self.weight_scales
        scales.copy_(next_quant_scale(amax, scales, torch.full_like(scales, recipe.weight.fp8_max), recipe))
