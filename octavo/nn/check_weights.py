"""check_weights: whether the FP8 codes that a model would use next are those of its weights."""

import torch
from torch import nn

from octavo.nn.linear import Linear
from octavo.nn.weights.operands import ranges_of
from octavo.nn.weights.plain import find_plain_source
from octavo.nn.weights.source import WeightSource
from octavo.nn.weights.write_watch import stale_codes
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import reciprocal
from octavo.ops.quantize import quantize


@torch.no_grad()
def check_weights(module: nn.Module) -> None:
    """Compare all codes that a module keeps with those that its weights give now: one read of the device for all.

    Args:
        module: any; what octavo.autocast keeps for parameters of torch.nn.Linear is looked at too.
    Raises:
        StaleCodesError: naming every weight that was written without notice. Its codes are kept.
    Exactness: every element is looked at; codes of a known scale (delayed scaling) are compared with all scales that
        its reciprocal, which is what is kept, may come from.
    """
    found: dict[str, torch.Tensor] = {}
    for name, child in module.named_modules():
        if isinstance(child, Linear) and (matrix := child.matrix) is not None:
            _add(found, f"{name}.weight" if name else "weight", matrix, child.source)
    for name, parameter in module.named_parameters():
        source = find_plain_source(parameter)
        if source is not None:
            _add(found, name, parameter, source)
    if not found:
        return
    device = next(iter(found.values())).device
    is_stale = torch.stack([flag.to(device) for flag in found.values()]).tolist()
    if any(is_stale):
        raise stale_codes([name for name, stale in zip(found, is_stale, strict=True) if stale])


def _add(found: dict[str, torch.Tensor], name: str, weight: torch.Tensor, source: WeightSource) -> None:
    held = source.held_for(weight)
    if held is None:
        return
    operands, recipe = held
    assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
    values = [part for _, part in ranges_of(weight, source.parts, recipe.weight)]
    differs = [_differs(x, q, recipe.has_state) for x, (_, q) in zip(values, operands, strict=True)]
    found[name] = torch.stack(differs).any()


def _differs(x: torch.Tensor, held: QuantizedTensor, has_known_scale: bool) -> torch.Tensor:
    """Whether x, quantized now, has other codes or scales: a bool on its device."""
    if not has_known_scale:
        q = quantize(x, held.scaling)
        return _other(q.qdata, held.qdata) | (q.scale != held.scale).any()
    middle = reciprocal(held.scale)
    limits = (torch.zeros_like(middle), torch.full_like(middle, torch.inf))
    guesses = [middle, *(torch.nextafter(middle, limit) for limit in limits)]
    return torch.stack([_other(quantize(x, held.scaling, quant_scale=g).qdata, held.qdata) for g in guesses]).all()


def _other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.view(torch.uint8) != b.view(torch.uint8)).any()
