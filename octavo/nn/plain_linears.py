"""FP8 for torch's own linears inside octavo.autocast: torch.nn.functional.linear with a Parameter as its weight.

That is what torch.nn.Linear calls, in whatever model or framework. octavo's modules never come here.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from octavo.errors import RecipeError
from octavo.nn.autocast_context import active_context
from octavo.nn.autocast_linear import find_owner
from octavo.nn.functional.emulated import EmulatedLinearFunction
from octavo.nn.functional.linear import ScaledLinearFunction, warn_of_fp16
from octavo.nn.weights.plain import plain_source
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.recipe import Recipe


class PlainLinears(TorchFunctionMode):
    """Runs F.linear under the innermost autocast's recipe."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        context = active_context()
        if context is None or not (context.enabled and context.recipe.is_fp8):
            return func(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            _say_it_stays("attention")
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    context = active_context()
    assert context is not None, "asked before"
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or id(weight) in context.skipped:
        return F.linear(input, weight, bias)
    recipe = context.recipe
    if input.dtype == torch.float64:
        _say_it_stays("float64")
        return F.linear(input, weight, bias)
    kind = input.device.type
    if not input.is_meta and torch.is_autocast_enabled(kind):  # what torch's own linear would compute in
        dtype = torch.get_autocast_dtype(kind)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    if input.dtype == torch.float16 and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        warn_of_fp16()
    flat = input.reshape(-1, weight.shape[1])  # [T, K]
    if recipe.has_state:
        return untraced()(flat, weight, bias, recipe).view(*input.shape[:-1], weight.shape[0])
    if recipe.static_input:
        raise RecipeError(f"recipe {recipe.name!r} has static input scales, and torch.nn.Linear has none; use convert")
    source, plan = plain_source(weight), LinearPlan(recipe)
    if recipe.is_emulated:
        out = EmulatedLinearFunction.apply(flat, weight, bias, source, plan, torch.is_grad_enabled())
    else:
        out = ScaledLinearFunction.apply(flat, weight, bias, source, plan)
    return out.view(*input.shape[:-1], weight.shape[0])


def _with_state(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """x [T, K] -> [T, N] by the linear that holds the state, in eager code."""
    own = find_owner(weight)
    if own is None:
        warn_that_it_stays("owner")
        return F.linear(x, weight, bias)
    return own.run(x, bias, recipe)


_untraced: list[Callable[..., torch.Tensor]] = []


def untraced() -> Callable[..., torch.Tensor]:
    """_with_state as a break in a compiled graph; made when such a context is entered, since it loads the compiler."""
    if not _untraced:
        reason = (
            "octavo.autocast keeps delayed scaling's state with torch's own modules, which torch.compile does not "
            "trace; after octavo.convert(model, 'delayed') the model compiles as a whole"
        )
        _untraced.append(torch.compiler.disable(_with_state, reason=reason))
    return _untraced[0]


_STAYS = {
    "float64": "torch.nn.Linear on a float64 input stays in float64: octavo.autocast brings FP8 to bfloat16, float16 "
    "and float32; convert the model and its input, or leave the module out by octavo.autocast(ignore=[module])",
    "attention": "torch.nn.MultiheadAttention stays in high precision under octavo.autocast: its products are inside "
    "one torch function; attention made of torch.nn.Linear, or octavo.nn.TransformerLayer, runs in FP8",
    "owner": "a linear stays in high precision under octavo.autocast: delayed scaling keeps its state with the module "
    "that owns the weight, and no module that is running owns this one; call F.linear in a method of that module, or "
    "use a recipe without state",
}


@torch.compiler.assume_constant_result  # called while torch.compile traces, which stops at a warning
def _say_it_stays(what: str) -> None:
    warn_that_it_stays(what)


@functools.cache  # once a process
def warn_that_it_stays(what: str) -> None:
    """Say what FP8 does not reach."""
    warnings.warn(_STAYS[what], stacklevel=4)
