"""WeightSource: the one owner of a weight's FP8 codes, and what the autograd Functions ask of it."""

from typing import Any

import torch

from octavo.nn.weights.operands import Operands, one_operand
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe


class WeightSource:
    """Gives the operands of a linear's GEMMs. A Function keeps its source for the backward, never its module.

    The weight itself is handed over at every call, as the Function has it: sharding engines put another tensor in the
    module's place between the two.

    Args:
        parts: row counts of the projections fused in the weight; each keeps its own blocks.

    Attributes:
        full_name: of the linear, for messages.
        group: process group over which delayed scaling's amaxes are reduced; None for all ranks.
        version: grows by one each time that the weight is committed.
        is_sharded: the module's weight has been a DTensor, so that it comes and goes.
        is_scaled: delayed scaling's scales of the weight were made from the weight itself (a frozen one's).
        has_whole: GEMMs take the weight as one operand where its scaling allows.
        has_values: the weight that is handed over, where there is one, has values.
        begins_early: delayed scaling takes over what was staged before the weight is gathered, not in its forward.
        has_begun: it has done so at least once.
    """

    has_whole = True
    has_values = True
    begins_early = False
    has_begun = False

    def __init__(self, parts: tuple[int, ...], version: int = 0, is_scaled: bool = False) -> None:
        self.parts, self.version, self.is_scaled = parts, version, is_scaled
        self.full_name, self.is_sharded = "", False
        self.group: Any = None

    def forward(self, weight: torch.Tensor | None, plan: LinearPlan, *, observe: bool = False) -> Operands:
        """Codes of the weight for the output GEMM: (row range, [rows, K]) pairs.

        Args:
            weight: [N, K], or None where there are codes alone.
            observe: a forward with gradients; with plan.stages delayed scaling stages the weight's amax.
        Raises:
            RecipeError: the codes that there are do not fit the plan's recipe.
        """
        raise NotImplementedError

    def whole(self, weight: torch.Tensor | None, plan: LinearPlan, *, observe: bool = False) -> QuantizedTensor | None:
        """forward as one [N, K] operand, or None where the scaling needs a GEMM a range."""
        return one_operand(self.forward(weight, plan, observe=observe))

    def whole_of_training(self, weight: torch.Tensor, plan: LinearPlan) -> QuantizedTensor | None:
        """whole of a training forward, which may make the backward's operands from the same read of the weight."""
        return self.whole(weight, plan, observe=True)

    def backward(self, weight: torch.Tensor | None, plan: LinearPlan, *, after: torch.Tensor | None = None) -> Operands:
        """Codes of the weight for the grad_input GEMM: (row range, [K, rows]) pairs.

        Args:
            after: a tensor of the backward, such as grad_output's scale: torch.compile would make codes that follow
                from other codes alone in the forward, and save them.
        Raises:
            RecipeError: there are codes alone, which cannot be transposed.
        """
        raise NotImplementedError

    def replace_weight(self, weight: Any) -> None:
        """The module is about to have another weight: sharded, gathered, or any."""
        self.release()
        self.is_sharded |= hasattr(weight, "device_mesh")

    # What only codes that are made again have a use for

    def renew(self, weight: torch.Tensor | None, plan: LinearPlan) -> None:
        """Make the codes of new values now, for a sampler and for the training steps that follow."""

    def stop_watching(self) -> None:
        """Look for unseen writes no more: only octavo writes this weight."""

    def pin(self, weight: torch.Tensor | None, plan: LinearPlan) -> None:
        """Make the codes that a forward reads; those of later weights go to their place. See live_weights.pin_codes."""

    def mark_fresh(self, weight: torch.Tensor | None, recipe: Recipe) -> None:
        """Take the pinned codes for those of the weight as it is: who wrote the one in place wrote the other."""

    def held_for(self, weight: torch.Tensor) -> tuple[Operands, Recipe] | None:
        """The codes that the next forward under their recipe takes as they are, and that recipe; None without any."""
        return None

    def held_bytes(self) -> int:
        """Bytes of the codes and scales that are held and could be made again."""
        return 0

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Codes and scales that stay where they are, by name, shared; none where new ones may have other addresses."""
        return {}

    def drop_prequantized(self) -> None:
        """Give up codes that a forward made for a backward, if none has read them."""

    def release(self) -> None:
        """Hold no codes: the next operands are made again. Called where the weight's values or memory go away."""
