"""Explicit pairs in a plain model: each linear's input and weight, with scales from a calibration."""

import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from octavo.deprecation import former_keywords
from octavo.errors import ConfigError
from octavo.nn.conversion import disable_torch_fast_path
from octavo.nn.overrides import checked_names
from octavo.numerics.scaling import Scaling, block_amax, compute_quant_scale, reciprocal
from octavo.qdq.operators import as_matrix, dequantize, quantize

_SCALING = Scaling.per_tensor()


class QDQLinear(nn.Module):
    """A linear with a Q/DQ pair on its input and one on its weight, both E4M3 with one stored scale.

    Args:
        linear: whose parameters it takes.
        input_amax: largest magnitude of the input, which maps to 448.
        weight_amax: largest magnitude of the weight, which maps to 448.
    """

    def __init__(self, linear: nn.Linear, input_amax: torch.Tensor, weight_amax: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.register_buffer("input_scale", _scale_of(input_amax).to(device))
        self.register_buffer("weight_scale", _scale_of(weight_amax).to(device))
        self.input_scale: torch.Tensor
        self.weight_scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., K] -> [..., N] of its dtype; named as torch.nn.Linear names it."""
        x = dequantize(quantize(input, self.input_scale), self.input_scale, dtype=input.dtype)
        codes = quantize(self.weight, self.weight_scale)
        return F.linear(x, dequantize(codes, self.weight_scale, dtype=input.dtype), self.bias)


class _Calibration:
    """Input amax of every linear, and which linears read the same tensor."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        self.amax: dict[str, torch.Tensor] = {}
        self.readers: dict[str, set[str]] = {name: {name} for name in linears}
        self._last: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._handles = [
            linear.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, linear in linears.items()
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def observe(_module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            x = args[0] if args else kwargs["input"]
            amax = block_amax(as_matrix(x.detach()), (-1, -1)).reshape(())
            self.amax[name] = torch.maximum(self.amax[name], amax) if name in self.amax else amax
            self._last = [(ref, reader) for ref, reader in self._last if ref() is not None]
            for ref, reader in self._last:
                if ref() is x and reader not in self.readers[name]:
                    self._join(name, reader)
            self._last.append((weakref.ref(x), name))

        return observe

    def _join(self, a: str, b: str) -> None:
        joined = self.readers[a] | self.readers[b]
        for name in joined:
            self.readers[name] = joined

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


@former_keywords(skip="ignore")
def insert(
    model: nn.Module, calibrate: Callable[[nn.Module], object], *, ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, QDQLinear]:
    """Replace a model's torch.nn.Linear modules by ones with explicit pairs, in place.

    Linears that read one tensor (q, k, v; gate, up) share the scale of their weights, too, so that `fuse` can make one
    product of them.

    Args:
        model: any module; its linears keep their parameters.
        calibrate: is called once with the model and runs it on typical inputs.
        ignore: full names of linears to leave as they are.
    Returns:
        name -> the linear that stands there now.
    Raises:
        ConfigError: where no linear is left to convert, a weight is not finite, or calibrate reached only some of them,
            or only with zeros, inf or NaN.
        RecipeError: ignore is no list of names.
    """
    kept = {"", *checked_names(ignore, "ignore")}  # "": a model that is a linear has no place to put another in
    found = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and name not in kept}
    if not found:
        raise ConfigError("insert found no torch.nn.Linear below the model that is not ignored")
    damaged = sorted(name for name, linear in found.items() if not linear.weight.isfinite().all())
    if damaged:
        raise ConfigError(
            f"the weights of {', '.join(damaged)} must be finite, and hold inf or NaN; repair or ignore them"
        )
    disable_torch_fast_path(model, nn.Linear)
    calibration = _Calibration(found)
    try:
        with torch.no_grad():
            calibrate(model)
    finally:
        calibration.close()
    missing = sorted(found.keys() - calibration.amax.keys())
    if missing:
        raise ConfigError(
            f"calibrate must run every linear, it did not reach {', '.join(missing)}; ignore them, or feed it more"
        )
    useless = sorted(name for name, amax in calibration.amax.items() if not (amax.isfinite() and amax > 0))
    if useless:
        raise ConfigError(
            f"calibrate gave no scale to {', '.join(useless)}: every input was zero, or some were not finite; run it "
            "on typical inputs"
        )
    placed = {}
    for name, linear in found.items():
        weights = [found[reader].weight for reader in calibration.readers[name]]
        weight_amax = torch.stack([block_amax(weight.detach(), (-1, -1)).reshape(()) for weight in weights]).amax()
        placed[name] = QDQLinear(linear, calibration.amax[name], weight_amax)
    of_linear = {found[name]: pair for name, pair in placed.items()}
    for name, module in list(model.named_modules(remove_duplicate=False)):  # a linear in several places stays one
        if module in of_linear and name not in kept:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, of_linear[module])
    return placed


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    return reciprocal(compute_quant_scale(amax.float(), _SCALING, torch.float32)).reshape(())
