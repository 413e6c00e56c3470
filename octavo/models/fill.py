"""fill: a checkpoint's values for a Decoder that has none, one parameter after the other; of a cut one its slices."""

import contextlib
import functools
import warnings

import torch

from octavo.models.checkpoint.names import ParameterNames, parameter_names
from octavo.models.checkpoint.read_ahead import read_ahead
from octavo.models.checkpoint.scaled_weight import fit
from octavo.models.checkpoint.stored import Part, StoredWeights
from octavo.models.decoder import Decoder
from octavo.models.initial import initial_weights
from octavo.nn import Linear
from octavo.nn.cut_linear import CutLinear
from octavo.nn.live_weights import slices_of
from octavo.nn.weights.cut import spans
from octavo.nn.weights.operands import merge_parts, quantize_forward
from octavo.nn.weights.slices import Slices
from octavo.numerics import QuantizedTensor, Recipe


def fill(
    model: Decoder,
    stored: StoredWeights,
    recipe: Recipe,
    device: torch.device | str,
    *,
    ignore: tuple[str, ...],
    seed: int,
    trainable: bool,
    keeps_codes: bool,
) -> None:
    """Put the stored weights into a model without values.

    Args:
        model: of what parallelize has cut, this rank's share is read alone where that has the bits of the whole.
        recipe: of its linears.
        device: where weights are read to, checked and put together.
        ignore: linears that stay in high precision.
        seed: of what the files lack by permission.
        trainable: codes are decoded.
        keeps_codes: high-precision weights are quantized one by one, a few others read ahead.
    """
    weights, decoded, plans = {}, [], []
    for parameter in parameter_names(stored.config):
        linear_name = parameter.name.removesuffix(".weight")
        takes_codes = parameter.is_linear_weight and not trainable and linear_name not in ignore
        linear, slices = _linear(model, linear_name) if takes_codes else None, slices_of(model, parameter.name)
        rest = None  # what is still to be cut when it was read
        if slices is not None and (
            _cuts_blocks(stored, parameter, slices)
            or (linear is not None and _has_shared_scales(stored, parameter, linear, keeps_codes))
        ):
            slices, rest = None, slices
        plans.append((parameter, linear_name, linear, slices, rest))
    reads = [
        (stored.num_bytes(parameter), functools.partial(stored.read, parameter, device, slices))
        for parameter, _, _, slices, _ in plans
    ]
    with contextlib.closing(read_ahead(reads, device)) as found:
        for (parameter, linear_name, linear, slices, rest), parts in zip(plans, found, strict=True):
            codes = None if linear is None else _fitting_codes(parts, recipe)
            if linear is not None and codes is not None:
                linear.load_quantized(codes if rest is None else rest.of_codes(merge_parts(codes, rest.parts)))
                continue
            if any(isinstance(part, QuantizedTensor) for part in parts):
                decoded.append(linear_name)
            weight = _decode(parameter, parts, model, seed, device, slices)
            if linear is None or not keeps_codes:
                weights[parameter.name] = weight if rest is None else rest.of_values(weight)
            elif rest is not None:
                assert recipe.weight is not None, "it has codes to keep"
                linear.load_quantized(rest.of_codes(quantize_forward(weight, rest.parts, recipe.weight)))
            else:
                linear.weight = torch.nn.Parameter(weight, requires_grad=False)
                linear.keep_codes_only(recipe)
    model.load_state_dict(weights, assign=True)
    for linear_name, scale in stored.input_scales.items():
        _linear(model, linear_name).set_input_scale(scale)
    if decoded:
        _warn_of_decoded(decoded, model.dtype, recipe, ignore, trainable)
    if any(isinstance(module, Linear) and module.weight is None for module in model.modules()):
        model.requires_grad_(False)


def _cuts_blocks(stored: StoredWeights, parameter: ParameterNames, slices: Slices) -> bool:
    """Whether slices begin within blocks of the file's codes."""
    scaling = stored.layout.weight
    if scaling is None or not any(stored.is_coded(name) for name, _ in parameter.parts):
        return False
    pairs = [pair for place in slices.of_parts() for pair in zip(scaling.block_size, place, strict=True)]
    return any(size != -1 and each.start % size for size, each in pairs)


def _has_shared_scales(stored: StoredWeights, parameter: ParameterNames, linear: Linear, keeps_codes: bool) -> bool:
    """Whether codes are to be made under scales of more than a rank's slice."""
    scaling = None if linear.recipe is None else linear.recipe.weight
    if scaling is None or not isinstance(linear, CutLinear) or not spans(scaling, linear.cut_dim == "in"):
        return False
    held = stored.layout.weight if stored.is_quantized(parameter) else None
    if held is None:
        return keeps_codes
    is_alike = (held.dtype, held.scale_format) == (scaling.dtype, scaling.scale_format)
    return not (is_alike and (held.is_per_tensor or held.block_size == scaling.block_size))


def _fitting_codes(parts: list[Part | None], recipe: Recipe) -> list[QuantizedTensor] | None:
    """A parameter's codes as a recipe's operands, bits unchanged; None where it has none or the recipe takes others."""
    codes = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(codes) != len(parts) or recipe.weight is None or recipe.has_state or recipe.is_emulated:
        return None
    fitted = [q for q in (fit(part, recipe.weight) for part in codes) if q is not None]
    return fitted if len(fitted) == len(codes) else None


def _linear(model: Decoder, name: str) -> Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, Linear), name
    return linear


def _warn_of_decoded(
    names: list[str], dtype: torch.dtype, recipe: Recipe, ignore: tuple[str, ...], trainable: bool
) -> None:
    """One warning a reason for codes that the model does not keep."""
    kept_out = [name for name in names if not trainable and (name in ignore or name == "lm_head")]
    others = [name for name in names if name not in kept_out]
    why = f"recipe {recipe.name!r} does not take them as they are; pass recipe='auto' to keep them"
    why = "gradients need parameters" if trainable else why
    for reason, group in ((why, others), (f"in high precision: {', '.join(kept_out[:4])}", kept_out)):
        if group:
            were = "1 FP8 weight was" if len(group) == 1 else f"{len(group)} FP8 weights were"
            warnings.warn(f"{were} decoded to {dtype}: {reason}", stacklevel=5)


def _decode(
    parameter: ParameterNames,
    parts: list[Part | None],
    model: Decoder,
    seed: int,
    device: torch.device | str,
    slices: Slices | None,
) -> torch.Tensor:
    """A parameter in the model's dtype, or slices of it; what the files lack is initialised."""
    decoded = {}
    for i, ((hf_name, _), part) in enumerate(zip(parameter.parts, parts, strict=True)):
        if part is None:
            initial = initial_weights(model.config, dtype=model.dtype, seed=seed)[parameter.name]
            part = parameter.split(initial)[hf_name].to(device)
            if slices is not None:
                part = part[slices.of_parts()[i][: part.dim()]]
        decoded[hf_name] = part.dequantize(model.dtype) if isinstance(part, QuantizedTensor) else part.to(model.dtype)
    return parameter.merge(decoded)
