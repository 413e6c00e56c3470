"""One norm that feeds a projection and a feed-forward block side by side (GPT-J), without gradients: in FP8 alone.

ParallelDecoderLayer takes the fused path where can_infer_parallel allows, and the modules themselves otherwise, with
the same bits.
"""

import torch

from octavo.distributed.tensor_group import whole
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.norm_linear import Norm, can_infer, norm_input, norm_operands
from octavo.nn.functional.norm_mlp import infer_mlp
from octavo.nn.linear import Linear


def can_infer_parallel(norm: Norm, linear: Linear, fc1: Linear, fc2: Linear) -> bool:
    """Whether infer_parallel may stand for these modules: see can_infer; all three linears under one recipe."""
    return can_infer(effective_recipe(linear.recipe), norm, linear, fc1, fc2)


def infer_parallel(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, linear: Linear, fc1: Linear, fc2: Linear, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """linear(norm(x + residual)), fc2(activation(fc1(norm(x + residual)))), and the sum.

    The norm is quantized once for both, but where each linear has a known scale of its own for its input.

    Args:
        x: [T, K].
        residual: [T, K] of x's dtype, or None for nothing to add.
        kind: "gelu" (tanh form, after fc1's bias), or "swiglu" for an fc1 without bias.
    Returns:
        (projection [T, N], the block's output [T, K], x + residual [T, K]).
    """
    recipe = effective_recipe(linear.recipe)
    plan, *plans = (each.begin(recipe) for each in (linear, fc1, fc2))
    of_norm = norm_operands(norm)
    normed, stream = norm_input(x, residual, *of_norm, plan, training=False, columns=False)
    rows = normed.rows
    if recipe.has_state or recipe.static_input:
        rows = norm_input(stream, None, *of_norm, plans[0], training=False, columns=False)[0].rows
    projected = linear.infer_codes(normed.rows, plan, x.dtype)
    return projected, whole(infer_mlp(rows, fc1, fc2, kind, (plans[0], plans[1]), x.dtype)), stream
