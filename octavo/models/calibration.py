"""Calibration: the largest magnitudes that a text gives to every linear's input and to K and V of every layer."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from octavo.errors import DataError
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.decoder import Decoder
from octavo.nn import Linear, PackedContext
from octavo.numerics import QuantizedTensor

K = TypeVar("K")
# What is being done, how much of it is done, and how much there is.
OnProgress = Callable[[str, int, int], None]
_BATCH_TOKENS = 8192
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclasses.dataclass(frozen=True)
class Amaxes:
    """Largest magnitudes over a text, each [1] fp32 on the model's device.

    Attributes:
        inputs: a linear's full name -> of its input; experts of one layer share one.
        keys: layer -> of the K that the KV cache holds, after its norm and RoPE.
        values: layer -> of the V that it holds.
    """

    inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    keys: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def kv_scales(self) -> tuple[KVScales, ...]:
        """amax / 448 of K and V, one KVScales a layer.

        Raises:
            DataError: a layer's K or V that is zero or not finite.
        """
        for what, found in (("K", self.keys), ("V", self.values)):
            for layer, amax in found.items():
                _check(f"{what} of layer {layer}", amax)
                if not amax.item():
                    raise DataError(f"{what} of layer {layer} is zero in all of the calibration text: it has no scale")
        layers = sorted(self.keys)
        return tuple(KVScales(input_scale(self.keys[i]).cpu(), input_scale(self.values[i]).cpu()) for i in layers)

    def input_scales(self) -> dict[str, torch.Tensor]:
        """amax / 448 of every input that is not zero throughout: a linear's full name -> [1] fp32.

        Raises:
            DataError: an input that is not finite.
        """
        for name, amax in self.inputs.items():
            _check(f"the input of {name}", amax)
        return {name: input_scale(amax) for name, amax in self.inputs.items() if amax.item() > 0.0}


def input_scale(amax: torch.Tensor) -> torch.Tensor:
    """The decode scale that maps amax to E4M3's largest value: amax / 448, fp32, one correctly rounded division."""
    amax = amax.float()
    return amax / torch.full_like(amax, _FP8_MAX)  # tensor / number multiplies by a rounded reciprocal on a GPU


@torch.no_grad()
def calibrate(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    on_progress: OnProgress | None = None,
    *,
    linears: bool = True,
) -> Amaxes:
    """Run token sequences through a model and take note of amaxes; its numerics are as they are.

    Args:
        sequences: token ids, none longer than the model's context.
        linears: look at the linears' inputs too; K and V alone take less.
    Raises:
        DataError: no sequence at all.
    """
    if not sequences:
        raise DataError("calibration needs at least one sequence of tokens, got none")
    found = Amaxes()
    named = model.named_modules() if linears else ()
    watched = {name: m for name, m in named if isinstance(m, Linear) and name != "lm_head"}
    for name, linear in watched.items():
        linear.observer = functools.partial(_observe, found, name)
    try:
        for batch, num_done in batches(sequences):
            context = _ObservingContext(found, [len(sequence) for sequence in batch], model)
            model(torch.tensor([t for sequence in batch for t in sequence], device=model.device), context)
            if on_progress is not None:
                on_progress("calibrating", num_done, len(sequences))
    finally:
        for linear in watched.values():
            linear.observer = None
    return found


def batches(sequences: Sequence[Sequence[int]]) -> Iterator[tuple[list[Sequence[int]], int]]:
    """Sequences in groups of a few thousand tokens, each with the number of sequences up to its end."""
    group: list[Sequence[int]] = []
    for i, sequence in enumerate(sequences, 1):
        group.append(sequence)
        if i == len(sequences) or sum(map(len, group)) + len(sequences[i]) > _BATCH_TOKENS:
            yield group, i
            group = []


class _ObservingContext:
    """Whole sequences whose K and V are looked at before they are rounded (nn.AttentionContext)."""

    def __init__(self, found: Amaxes, lengths: list[int], model: Decoder) -> None:
        self._packed = PackedContext.from_lengths(lengths, model.numerics, model.device, model.kv_table)
        self.positions = self._packed.positions
        self._found = found

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float
    ) -> torch.Tensor:
        _raise_to(self._found.keys, layer_index, k)
        _raise_to(self._found.values, layer_index, v)
        return self._packed.attend(layer_index, q, k, v, softmax_scale=softmax_scale)


def _observe(found: Amaxes, name: str, role: str, tensor: torch.Tensor, _: QuantizedTensor | None) -> None:
    if role == "input" and tensor.numel():
        _raise_to(found.inputs, name, tensor)


def _raise_to(amaxes: dict[K, torch.Tensor], key: K, tensor: torch.Tensor) -> None:
    amax = tensor.abs().amax().float().reshape(1)  # stays on the device: no wait a layer; NaN stays NaN
    amaxes[key] = torch.maximum(amaxes[key], amax) if key in amaxes else amax


def _check(what: str, amax: torch.Tensor) -> None:
    if not torch.isfinite(amax).all():
        raise DataError(f"{what} is not finite on the calibration text; the model cannot run it in bf16")
