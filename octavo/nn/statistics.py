"""Per-layer statistics of a linear's operands and results, under TransformerEngine's names; nothing when off.

An observer sits on the chosen linears at the chosen steps alone. Numbers stay on the device until the step ends.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from octavo.errors import RecipeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.cut_linear import CutLinear, sliced_parameters
from octavo.nn.linear import Linear
from octavo.nn.overrides import select
from octavo.numerics.formats import format_of
from octavo.numerics.quantized import QuantizedTensor

# TransformerEngine's name of a tensor -> the role that an observer sees
TENSORS = {
    "activation": "input",
    "weight": "weight",
    "output": "output",
    "gradient": "grad_output",
    "dgrad": "grad_input",
    "wgrad": "grad_weight",
}
FP8_STATS = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse")
TENSOR_STATS = ("cur_amax", "dynamic_range", "min", "max", "mean", "std", "l1_norm", "l2_norm")
STATS = (*FP8_STATS, *TENSOR_STATS)
_Packed = tuple[list[tuple[str, str]], torch.Tensor]  # (layer, tensor) of each row, [rows, 14] fp64


@dataclasses.dataclass(frozen=True)
class StatisticsRow:
    """The statistics of one tensor of one linear in one step, its micro-batches taken together.

    Attributes:
        step: the step's number.
        layer: the linear's full name.
        tensor: a key of TENSORS.
        values: statistic -> value. FP8_STATS are there where the tensor was quantized; each is of the codes that the
            GEMM along the tensor's rows multiplied: underflows% (nonzero elements whose code is zero), overflows%
            (clipped by more than half a unit in the last place), scale_inv_* (the decode scales), mse. dynamic_range
            is log2(largest / smallest nonzero magnitude). NaN is left out of cur_amax, and no inf or NaN counts in
            dynamic_range; the others become NaN or inf with their tensor.
    """

    step: int
    layer: str
    tensor: str
    values: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON row; what is not finite is None, which JSON has."""
        finite = {key: value if math.isfinite(value) else None for key, value in self.values.items()}
        return {"step": self.step, "layer": self.layer, "tensor": self.tensor, **finite}

    def scalars(self) -> Iterator[tuple[str, float]]:
        """TransformerEngine's tags, {layer}_{tensor}_{statistic}, for TensorBoard."""
        return ((f"{self.layer}_{self.tensor}_{key}", value) for key, value in self.values.items())


class TensorStatistics:
    """Collects statistics of a model's linears, step by step.

    Call `step()` after every optimizer step and take the rows with `rows()`. Forwards in evaluation mode or without
    gradients are not looked at. Fused modules run unfused, to the same bits, in a step that is observed.

    Args:
        model: with octavo's linears in it (octavo.convert makes them).
        stats: of STATS.
        tensors: of TENSORS.
        layers: full names, prefixes that end at a dot, or single parts of names (see octavo.nn.overrides); empty takes
            every linear.
        freq: observe steps whose number is a multiple of it.
        start_step: the first step that is observed.
        end_step: the first one after it that is not; None has no end.
        first_step: the number of the step that comes first (a resumed run's).
        gather: gives every rank the value of each, by rank; called at the end of each observed step, whose rows are
            then those of all ranks' micro-batches. None for one process, or for this rank's alone. Slices of
            tensor-parallel ranks are taken together, and what they have alike once; a sum of their parts (the dgrad of
            a ColumnLinear, say) has no row.
    Raises:
        RecipeError: an unknown name, no linear of octavo's, or a linear that has an observer already.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stats: Sequence[str] = STATS,
        tensors: Sequence[str] = tuple(TENSORS),
        layers: Iterable[str] = (),
        freq: int = 1,
        start_step: int = 0,
        end_step: int | None = None,
        first_step: int = 0,
        gather: Callable[[_Packed], list[_Packed]] | None = None,
    ) -> None:
        _check_known("stats", stats, STATS)
        _check_known("tensors", tensors, tuple(TENSORS))
        if freq < 1:
            raise RecipeError(f"freq must be a number of steps >= 1, got {freq}")
        self._stats, self._tensors = tuple(stats), tuple(tensors)
        self._freq, self._start, self._end = freq, start_step, end_step
        self._layers = _choose_layers(model, tuple(layers))
        self._sums: dict[tuple[str, str], _Sums] = {}
        self._rows: list[StatisticsRow] = []
        self._step = first_step
        self._tensor_group, _ = sliced_parameters(model)
        self._gather = gather or (lambda own: [own])
        self._hooks: list[RemovableHandle] = []
        self._in_training = False
        self._attach()

    @property
    def layers(self) -> tuple[str, ...]:
        """Full names of the linears that are looked at."""
        return tuple(self._layers)

    def is_observed(self, step: int) -> bool:
        """Whether a step of this number is looked at."""
        return self._start <= step < (math.inf if self._end is None else self._end) and step % self._freq == 0

    def step(self) -> None:
        """End the current step: its sums become rows (one read of the device), and the next step begins."""
        if self.is_observed(self._step):
            packed = torch.stack([sums.pack() for sums in self._sums.values()]).cpu() if self._sums else torch.empty(0)
            whole: dict[tuple[str, str], _Sums] = {}
            for keys, numbers in self._gather((list(self._sums), packed)):
                for key, row in zip(keys, numbers, strict=True):
                    sums = _Sums.unpack(row)
                    whole[key] = whole[key].merge(sums) if key in whole else sums
            for (layer, tensor), sums in whole.items():
                known = _derive(*sums.pack().tolist())
                quantized = not math.isnan(known["scale_inv_min"])
                values = {stat: known[stat] for stat in self._stats if quantized or stat not in FP8_STATS}
                self._rows.append(StatisticsRow(self._step, layer, tensor, values))
            self._sums = {}
        self._step += 1
        self._attach()

    def rows(self) -> list[StatisticsRow]:
        """The rows of the steps that have ended since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        """Take the observers off; what was collected in an unfinished step is dropped."""
        self._detach()
        self._sums = {}

    def _attach(self) -> None:
        self._detach()
        if self.is_observed(self._step):
            for name, linear in self._layers.items():
                linear.observer = functools.partial(self._observe, name, linear)
                self._hooks.append(linear.register_forward_pre_hook(self._enter))

    def _detach(self) -> None:
        for linear in self._layers.values():
            linear.observer = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enter(self, linear: nn.Module, _: object) -> None:
        # activation checkpointing runs the forward again inside the backward
        is_replay = torch._C._current_graph_task_id() != -1
        self._in_training = linear.training and torch.is_grad_enabled() and not is_replay

    def _observe(
        self, name: str, linear: Linear, role: str, tensor: torch.Tensor, codes: QuantizedTensor | None
    ) -> None:
        key = _TENSOR_OF[role]
        if key not in self._tensors or tensor.numel() == 0 or (role in _FORWARD and not self._in_training):
            return
        if not self._is_counted(linear, role):
            return
        if role == "weight":
            tensor = tensor.to(torch.bfloat16)  # what a weight is quantized from
        sums = _Sums.of(tensor.detach(), decoded(linear, role, codes))
        known = self._sums.get((name, key))
        self._sums[name, key] = sums if known is None else known.merge(sums)

    def _is_counted(self, linear: Linear, role: str) -> bool:
        """Whether what this tensor-parallel rank sees goes into the rows of all."""
        if self._tensor_group is None:
            return True
        is_sliced = linear.is_sliced(role) if isinstance(linear, CutLinear) else False
        return bool(is_sliced) or (is_sliced is False and self._tensor_group.rank == 0)


def decoded(
    linear: Linear, role: str, codes: QuantizedTensor | None
) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """What an observed operand became: (codes [M, K], decode scales of every element [M, K], largest FP8 value).

    Args:
        role: as an observer gets it.
        codes: as an observer gets them; a weight whose parts end in ragged blocks comes without codes.
    Returns:
        None for what is not quantized.
    """
    if codes is not None:
        return codes.qdata, codes.expanded_scale(), codes.scaling.fp8_max
    recipe = effective_recipe(linear.recipe)
    if role != "weight" or not recipe.in_fp8("output"):
        return None
    parts = [q for _, q in linear.forward_operands(recipe)]
    qdata = torch.cat([q.qdata.view(torch.uint8) for q in parts]).view(parts[0].qdata.dtype)
    return qdata, torch.cat([q.expanded_scale() for q in parts]), parts[0].scaling.fp8_max


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What a tensor's statistics are made from, as fp64 scalars on its device: added up, or the extreme taken."""

    added: torch.Tensor  # [7] numel, sum, sum of |x|, of squares, underflows, overflows, squared errors
    smallest: torch.Tensor  # [3] x, nonzero |x|, decode scale
    largest: torch.Tensor  # [4] x, |x| without NaN, finite |x|, decode scale

    @classmethod
    def of(cls, x: torch.Tensor, operand: tuple[torch.Tensor, torch.Tensor, float] | None) -> "_Sums":
        """Of x [M, K] and what it was quantized to."""
        x = x.float()
        magnitude = x.abs()
        finite = magnitude.isfinite()
        nonzero = torch.where(finite & (magnitude > 0), magnitude, math.inf)
        nan = x.new_full((), math.nan)
        fp8 = (nan, nan, nan, nan, nan) if operand is None else _quantization(x, magnitude, *operand)
        underflows, overflows, error, scale_min, scale_max = fp8
        wide = functools.partial(torch.sum, dtype=torch.float64)
        energy = torch.linalg.vector_norm(x, dtype=torch.float64).square()
        numel = x.new_full((), x.numel())
        without_nan = torch.where(magnitude.isnan(), 0.0, magnitude)
        return cls(
            _stack(numel, wide(x), wide(magnitude), energy, underflows, overflows, error),
            _stack(x.amin(), nonzero.amin(), scale_min),
            _stack(x.amax(), without_nan.amax(), torch.where(finite, magnitude, 0.0).amax(), scale_max),
        )

    def merge(self, other: "_Sums") -> "_Sums":
        """Of both tensors together."""
        return _Sums(
            self.added + other.added,
            torch.minimum(self.smallest, other.smallest),
            torch.maximum(self.largest, other.largest),
        )

    def pack(self) -> torch.Tensor:
        """[14] fp64, as _derive takes them."""
        return torch.cat([self.added, self.smallest, self.largest])

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "_Sums":
        """What pack has packed."""
        return cls(*packed.split([7, 3, 4]))


def _quantization(
    x: torch.Tensor, magnitude: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, fp8_max: float
) -> tuple[torch.Tensor, ...]:
    """(underflows, overflows, squared error, smallest scale, largest scale)."""
    half_ulp = 2.0 ** (math.frexp(fp8_max)[1] - 2 - format_of(qdata.dtype).mantissa_bits)
    is_zero = (qdata.view(torch.uint8) & 0x7F) == 0
    clipped = (magnitude / scale > fp8_max + half_ulp) & magnitude.isfinite()
    error = torch.linalg.vector_norm(qdata.float() * scale - x, dtype=torch.float64).square()
    return (is_zero & (magnitude > 0)).sum(), clipped.sum(), error, scale.amin(), scale.amax()


def _derive(
    numel: float,
    total: float,
    l1: float,
    energy: float,
    underflows: float,
    overflows: float,
    error: float,
    low: float,
    smallest: float,
    scale_min: float,
    high: float,
    amax: float,
    largest: float,
    scale_max: float,
) -> dict[str, float]:
    """Every statistic, by name; FP8_STATS are NaN for a tensor that was not quantized."""
    variance = (energy - total * total / numel) / (numel - 1) if numel > 1 else math.nan
    return {
        "underflows%": 100.0 * underflows / numel,
        "overflows%": 100.0 * overflows / numel,
        "scale_inv_min": scale_min,
        "scale_inv_max": scale_max,
        "mse": error / numel,
        "cur_amax": amax,
        "dynamic_range": math.log2(largest / smallest) if largest > 0 else 0.0,
        "min": low,
        "max": high,
        "mean": total / numel,
        "std": math.sqrt(variance) if variance > 0 else 0.0 if variance == variance else math.nan,
        "l1_norm": l1,
        "l2_norm": math.sqrt(energy),
    }


_FORWARD = ("input", "weight", "output")
_TENSOR_OF = {role: tensor for tensor, role in TENSORS.items()}


def _stack(*scalars: torch.Tensor) -> torch.Tensor:
    return torch.stack([scalar.double() for scalar in scalars])


def _choose_layers(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, Linear]:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    if not linears:
        raise RecipeError("statistics are of octavo's linears, and this model has none; octavo.convert makes them")
    chosen = select(patterns, linears, "layers") if patterns else list(linears)
    for name in chosen:
        if linears[name].observer is not None:
            raise RecipeError(f"{name} has an observer already; close what set it first")
    return {name: linears[name] for name in chosen}


def _check_known(what: str, names: Sequence[str], known: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise RecipeError(f"{what} must be of {', '.join(known)}, got {unknown or 'none'}")
