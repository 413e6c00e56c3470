"""The weights of a module as its forward reads them: which storages those are, and how new values are committed.

Who records addresses (a CUDA graph) pins the codes first; who writes new weights into the storages takes their names
from live_tensors and the values from make_tensors.
"""

import warnings

import torch
from torch import nn

from octavo.errors import RecipeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.autocast_linear import held_linears
from octavo.nn.cut_embedding import CutEmbedding
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.linear import Linear
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.operands import (
    Operands,
    join_ranges,
    merge_parts,
    name_tensors,
    quantize_forward,
    ranges_of,
)
from octavo.nn.weights.plain import drop_plain_sources
from octavo.nn.weights.slices import Slices
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.ops.quantize import quantize


def keeps_codes(recipe: Recipe | None) -> bool:
    """Whether a linear's output under its recipe comes from codes that it keeps."""
    if recipe is None or not recipe.is_fp8:
        return False
    return not recipe.emulated and "output" not in recipe.high_precision_gemms


def pin_codes(module: nn.Module) -> None:
    """Make the codes that inference under the linears' own recipes reads, and let them stay where they are.

    From here on the codes of new weights are written into the same storage, at the first forward that needs them or
    when this is called again. Moving the module to another device ends it.
    """
    # made where gradients are off, but not as inference tensors, which could not be written later
    with torch.inference_mode(False), torch.no_grad():
        for child in module.modules():
            if isinstance(child, Linear) and child.recipe is not None and keeps_codes(child.recipe):
                child.source.pin(child.matrix, child.plan_for(child.recipe))


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that an inference forward of a module with pinned codes reads.

    Returns:
        Parameters and buffers by their names, codes and known scales as "<linear>.codes.0", ".scales.0", ".scales" (of
        the whole weight), ".input_scale", ".input_quant_scale"; the storages themselves, no copies, each once.
    """
    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    found |= dict(module.named_buffers())
    for name, child in module.named_modules():
        if isinstance(child, Linear):
            found |= {f"{name}.{key}": tensor for key, tensor in child.live_tensors().items()}
    return found


def own_slices(module: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What a module holds of a whole parameter: itself, but for what is cut among ranks."""
    slices = slices_of(module, name)
    return whole if slices is None else slices.of_values(whole)


def slices_of(module: nn.Module, name: str) -> Slices | None:
    """Where what a module holds of a parameter lies in the whole one; None for all of it."""
    owner = module.get_submodule(name.rpartition(".")[0])
    return owner.slices if isinstance(owner, Linear | CutEmbedding) else None


def make_tensors(
    linear: Linear, values: torch.Tensor | list[QuantizedTensor], quant_scale: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """What live_tensors would hold of a linear's weight, had it these values: nothing of the linear changes.

    Args:
        values: [N, K] of the weight's dtype, or one QuantizedTensor a part for a linear that holds codes only; of the
            whole weight where the linear has slices of it.
        quant_scale: delayed scaling's scales of the linear.
    Raises:
        RecipeError: codes for a linear that holds a high-precision weight.
    """
    recipe, slices = linear.recipe, linear.slices
    if isinstance(values, list) and linear.weight is not None:
        raise RecipeError("codes are not taken where a linear holds the high-precision weight; send that")
    made = {}
    if linear.weight is not None:
        made["weight"] = values if slices is None else slices.of_values(values)  # type: ignore[arg-type]
    if recipe is not None and keeps_codes(recipe):
        operands = _operands(linear.parts if slices is None else slices.parts, recipe, values, quant_scale)
        if slices is not None:
            operands = merge_parts(slices.of_codes(operands), linear.parts)
        made |= name_tensors(*join_ranges(operands) if linear.source.has_whole else (operands, None))
    return made  # type: ignore[return-value]


def _operands(
    parts: tuple[int, ...],
    recipe: Recipe,
    values: torch.Tensor | list[QuantizedTensor],
    quant_scale: torch.Tensor | None,
) -> Operands:
    assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
    if isinstance(values, list):
        return merge_parts(values, parts)
    if quant_scale is None:
        return quantize_forward(values, parts, recipe.weight)
    known = quant_scale[DelayedState.WEIGHT :]
    ranges = ranges_of(values, parts, recipe.weight)
    return [(rows, quantize(part, recipe.weight, quant_scale=known[i])) for i, (rows, part) in enumerate(ranges)]


def renew_codes(module: nn.Module) -> list[QuantizedTensor]:
    """Make the codes of every linear's new weight now: for a sampler, and for training steps on the same weights.

    Pinned codes are overwritten by the quantizer itself. Where the backward's codes of the last version lay in memory
    during a forward (several micro-batches, or prequantized codes), the next ones are made by the same launch.

    Returns:
        The codes for the output GEMMs; shared, not copied.
    """
    found: list[QuantizedTensor] = []
    for child in module.modules():
        if isinstance(child, Linear) and (recipe := effective_recipe(child.recipe)).is_fp8:
            child.source.renew(child.matrix, child.plan_for(recipe))
            found += child.quantized_weight(recipe)
    return found


def adopt_codes(module: nn.Module) -> None:
    """Take the pinned codes of every linear for those of its weight: they were written together with it."""
    for child in module.modules():
        if isinstance(child, Linear) and child.recipe is not None:
            child.source.mark_fresh(child.matrix, child.recipe)


def stop_watching(module: nn.Module) -> None:
    """Look for unseen writes no more: for a trainer that alone writes the weights, and commits what it wrote.

    That saves some three small launches a linear and forward of the first steps; see docs/adr/0010.
    """
    for child in module.modules():
        if isinstance(child, Linear):
            child.source.stop_watching()


def mark_weights_updated(module: nn.Module, *, trained_only: bool = False) -> None:
    """Commit new weights: each Linear and Decoder under module moves to its next weight version, each Linear drops its
    8-bit copies.

    Copies of other modules' weights (octavo.autocast over torch.nn.Linear) are all dropped.

    Args:
        trained_only: an optimizer wrote them: Linears whose weight has requires_grad=False keep version and copies.
    """
    drop_plain_sources()
    for child in module.modules():
        for linear in (child, *(held for _, held in held_linears(child))):
            if isinstance(linear, Linear):
                is_frozen = linear.weight is None or not linear.weight.requires_grad
                linear.weight_version += not (trained_only and is_frozen)
            elif "weight_version" in vars(linear):  # a Decoder's
                vars(linear)["weight_version"] += 1


def keep_codes_only(module: nn.Module) -> int:
    """Keep only the codes of every frozen linear with an FP8 recipe: the base model of a LoRA run, or for inference.

    The model's state dict then lacks these weights: save it before. torch.export takes the codes along.

    Args:
        module: its octavo linears whose weight has requires_grad=False are changed; others stay. Where linears in FP8
            are there and none of them is frozen, a warning says so; another one where parameters beside them train, and
            a backward through their codes cannot be.
    Returns:
        Bytes of high-precision weights that were given up.
    Raises:
        NonFiniteError: a parameter is inf or NaN; nothing was given up.
    """
    check_finite_weights(module)
    trains = any(parameter.requires_grad for parameter in module.parameters())
    saved, num_trained, num_forward_only, holds_codes = 0, 0, 0, False
    for child in module.modules():
        if not isinstance(child, Linear):
            continue
        recipe = effective_recipe(child.recipe)
        if child.weight is not None and recipe.is_fp8 and not recipe.is_emulated:
            if child.weight.requires_grad:
                num_trained += 1
                continue
            saved += child.weight.nbytes
            assert recipe.weight is not None, "it is in FP8"
            num_forward_only += trains and not recipe.weight.is_square and recipe.grad_output is not None
            child.keep_codes_only(recipe)
        holds_codes |= child.weight is None
    if num_trained and not holds_codes:
        warnings.warn(
            f"keep_codes_only kept all {num_trained} weights of linears in FP8, since each has requires_grad=True; "
            "call model.requires_grad_(False) first",
            stacklevel=2,
        )
    if num_forward_only:
        warnings.warn(
            f"keep_codes_only kept codes of {num_forward_only} linears which no backward can transpose, and other "
            "parameters of the model train: gradients through these linears will be an error; use 'blockwise' or a "
            "recipe of one scale a tensor",
            stacklevel=2,
        )
    return saved


def freeze_to_fp8(module: nn.Module) -> int:
    """The former name of keep_codes_only, which leaves octavo with the next release."""
    warnings.warn(
        "octavo.nn.freeze_to_fp8 leaves octavo with the next release; use octavo.nn.keep_codes_only",
        DeprecationWarning,
        stacklevel=2,
    )
    return keep_codes_only(module)
