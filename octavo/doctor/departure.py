"""Where a model in FP8 first departs from the same model in bf16: one forward and backward of each, layer by layer.

A linear's own error (what its codes and GEMMs add to what they were given) names the culprit; the error against fp32,
which adds up from layer to layer, shows what came of it.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from octavo.amp import Levels
from octavo.deprecation import former_keywords
from octavo.nn import GroupedLinear, Linear, check_weights
from octavo.nn.conversion import DEFAULT_IGNORE
from octavo.nn.functional.emulated import emulate
from octavo.nn.statistics import TENSORS, decoded
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.ops.quantize import quantize

M = TypeVar("M", bound=nn.Module)

DEFAULT_THRESHOLD_DB = 20.0
_THRESHOLDS_DB = {"nvfp4": 12.0}  # 4 bits keep 19 to 20 dB of well-shaped numbers
_ROLES = {role: tensor for tensor, role in TENSORS.items()}
_OPERANDS = ("activation", "weight", "gradient")


@dataclasses.dataclass(frozen=True)
class Departure:
    """One tensor of one linear; SQNR in dB, None where it was not measured.

    Attributes:
        layer: the linear's full name.
        tensor: "activation", "weight", "output", "gradient", "dgrad" or "wgrad".
        own_db: an operand's codes against the operand, by channel (see balanced_sqnr); a result against the fp32
            product of what went into its GEMM.
        fp8_db: the tensor in the FP8 run against the fp32 run.
        bf16_db: the tensor in the bf16 run against the fp32 run.
    """

    layer: str
    tensor: str
    own_db: float | None
    fp8_db: float | None
    bf16_db: float | None


@dataclasses.dataclass(frozen=True)
class DepartureReport:
    """What find_departure saw, in the order in which the FP8 run computed it.

    Attributes:
        recipe: the recipe's name.
        threshold_db: what counts as a departure.
        losses: of the runs in fp32, bf16 and FP8.
    """

    recipe: str
    threshold_db: float
    rows: tuple[Departure, ...]
    losses: tuple[float, float, float]

    @property
    def first(self) -> Departure | None:
        """The culprit: the first operand or result whose own error passes the threshold; None where there is none."""
        return next((row for row in self.rows if _below(row.own_db, self.threshold_db)), None)

    @property
    def first_accumulated(self) -> Departure | None:
        """The first tensor that is beyond the threshold in FP8 and not in bf16, by errors that added up."""
        beyond = (row for row in self.rows if _below(row.fp8_db, self.threshold_db))
        return next((row for row in beyond if not _below(row.bf16_db, self.threshold_db)), None)

    @property
    def verdict(self) -> str:
        """The finding in one sentence."""
        first, accumulated = self.first, self.first_accumulated
        if first is not None:
            kind = "operand" if first.tensor in _OPERANDS else "result"
            return (
                f"FP8 ({self.recipe}) first departs from bf16 in layer {first.layer}, {kind} {first.tensor}: "
                f"{first.own_db:.1f} dB of its own error, threshold {self.threshold_db:g} dB"
            )
        if accumulated is not None:
            return (
                f"no layer departs by itself; errors add up to {accumulated.fp8_db:.1f} dB at layer "
                f"{accumulated.layer}, {accumulated.tensor} (threshold {self.threshold_db:g} dB)"
            )
        return f"FP8 ({self.recipe}) keeps at least {self.threshold_db:g} dB (SQNR) to fp32 in every layer"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; equal tensors have 999 dB, and one that has gone bad -999."""
        return {
            "recipe": self.recipe,
            "threshold_db": self.threshold_db,
            "losses": dict(zip(("fp32", "bf16", "fp8"), map(_finite, self.losses), strict=True)),
            "first": None if self.first is None else _plain(self.first),
            "first_accumulated": None if self.first_accumulated is None else _plain(self.first_accumulated),
            "verdict": self.verdict,
            "rows": [_plain(row) for row in self.rows],
        }


def balanced_sqnr(reference: torch.Tensor, approximation: torch.Tensor) -> torch.Tensor:
    """SQNR in which every row, and every column, counts the same, however large its values.

    Noise over signal of each row, at most 1 (nothing is left of it), is averaged over the rows; the same over columns;
    the worse of the two. Plain SQNR is that of the largest values alone, and does not see that an outlier has erased
    all others.

    Args:
        reference: [M, K]. All-zero rows and columns have no say.
        approximation: [M, K].
    Returns:
        dB, fp64 scalar on their device; inf where they are equal, -inf where either is not finite.
    """
    exact = reference.detach().double()
    noise = (exact - approximation.detach().double()).square()
    signal = exact.square()
    shares = []
    for dim in (0, 1):
        energy, lost = signal.sum(dim), noise.sum(dim)
        share = torch.where(energy > 0, lost / energy, torch.where(lost > 0, 1.0, 0.0)).clamp_max(1.0)
        shares.append(share.sum() / (energy > 0).sum().clamp_min(1))
    worst = torch.stack(shares).max()
    bad = ~(exact.isfinite().all() & noise.isfinite().all())
    return torch.where(bad, -math.inf, -10.0 * torch.log10(worst))


def plain_sqnr(reference: torch.Tensor, approximation: torch.Tensor) -> torch.Tensor:
    """octavo.numerics.analysis.sqnr that stays on the device: fp64 scalar, inf where equal, -inf where not finite."""
    exact = reference.detach().double()
    noise = torch.linalg.vector_norm(exact - approximation.detach().double())
    ratio = 20.0 * torch.log10(torch.linalg.vector_norm(exact) / noise)
    return torch.where(noise == 0, math.inf, torch.where(noise.isfinite() & exact.isfinite().all(), ratio, -math.inf))


@former_keywords(skip="ignore")
def find_departure(
    model: M,
    run: Callable[[M], torch.Tensor],
    recipe: Recipe | str | None = "blockwise",
    *,
    threshold_db: float | None = None,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
    overrides: Mapping[str, Recipe | str] | None = None,
) -> DepartureReport:
    """Run a model once in fp32, in bf16 and in FP8, forward and backward, and compare every linear's tensors.

    Experts are left out: which rows they see differs from run to run.

    Args:
        model: any module; copies of it are run (one in fp32), it is left as it is.
        run: the loss of one batch, given a model; must compute the same each time.
        recipe: the FP8 recipe; None keeps the recipes that the linears have.
        threshold_db: SQNR below which a tensor counts as departed; None for 20, or 12 under nvfp4. E4M3 keeps 31 dB
            of well-shaped numbers and E5M2 25.
        ignore: as octavo.convert takes it.
        overrides: as octavo.convert takes them.
    Returns:
        DepartureReport.
    Raises:
        RecipeError: see octavo.amp.Levels and octavo.convert.
        BackendError: see octavo.amp.Levels and octavo.convert.
        StaleCodesError: a weight was written without notice (octavo.nn.check_weights).
    """
    check_weights(model)
    reference_model, reference = copy.deepcopy(model).float(), _Reference()
    levels = Levels(reference_model, recipe, ignore=ignore, overrides=overrides)
    for linear in levels.linears:
        linear.recipe = get_recipe("bf16")  # in the model's dtype, which is fp32 here
    losses = [_observe(reference_model, levels, run, reference)]
    del reference_model
    tested = copy.deepcopy(model)
    levels = Levels(tested, recipe, ignore=ignore, overrides=overrides)
    name = next(iter(levels.linears.values())).name
    levels.set("O2")
    bf16 = _Comparison(reference.tensors)
    losses.append(_observe(tested, levels, run, bf16))
    levels.set("O1")
    if any(used.has_state for used in levels.linears.values()):
        _backward(tested, run)  # delayed scaling learns its scales from a first step
    fp8 = _Comparison(reference.tensors, own=True)
    losses.append(_observe(tested, levels, run, fp8))
    threshold = _THRESHOLDS_DB.get(name, DEFAULT_THRESHOLD_DB) if threshold_db is None else threshold_db
    return DepartureReport(name, threshold, _rows(fp8, bf16), (losses[0], losses[1], losses[2]))


class _Reference:
    """Keeps the fp32 run's tensors."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, str], torch.Tensor] = {}

    def __call__(
        self, name: str, linear: Linear, role: str, tensor: torch.Tensor, codes: QuantizedTensor | None
    ) -> None:
        if role in ("input", "output") and (name, role) in self.tensors:
            return  # of a layer that runs several times, the first forward and its backward, which comes last
        # a model may write over what it was given, but not over weights and their gradients
        keeps = role in ("weight", "grad_weight")
        self.tensors[name, role] = tensor.detach() if keeps else tensor.detach().clone()


class _Comparison:
    """Compares another run's tensors with the reference as they come; nothing is read from the device meanwhile.

    Args:
        own: also measure what each layer adds by itself.
    """

    def __init__(self, reference: Mapping[tuple[str, str], torch.Tensor], own: bool = False) -> None:
        self._reference, self._measures_own = reference, own
        self._inputs: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self.accumulated: dict[tuple[str, str], torch.Tensor] = {}
        self.own: dict[tuple[str, str], torch.Tensor] = {}

    def __call__(
        self, name: str, linear: Linear, role: str, tensor: torch.Tensor, codes: QuantizedTensor | None
    ) -> None:
        key = (name, role)
        if tensor.numel() == 0 or (role in ("input", "weight", "output") and key in self.accumulated):
            return
        for results in (self.accumulated, self.own):
            results.pop(key, None)  # so that a later backward also takes its place in the order
        self.accumulated[key] = plain_sqnr(self._reference[key], tensor)
        if not self._measures_own:
            return
        if role == "input":
            self._inputs[name] = tensor.detach().clone()
        elif role == "grad_output":
            self._gradients[name] = tensor.detach().clone()
        own = self._operand(linear, role, tensor, codes) if _ROLES[role] in _OPERANDS else None
        expected = self._product(name, linear, role)
        if own is not None:
            self.own[key] = own
        elif expected is not None:
            self.own[key] = plain_sqnr(expected, tensor)

    def _operand(
        self, linear: Linear, role: str, tensor: torch.Tensor, codes: QuantizedTensor | None
    ) -> torch.Tensor | None:
        operand = decoded(linear, role, codes)
        if operand is not None:
            qdata, scale, _ = operand
            return balanced_sqnr(tensor, qdata.float() * scale)
        emulated = emulated_operand(tensor, linear.recipe, role)
        return None if emulated is None else balanced_sqnr(tensor, emulated)

    def _product(self, name: str, linear: Linear, role: str) -> torch.Tensor | None:
        """What a GEMM would give of its high-precision operands, in fp32."""
        assert linear.weight is not None, "Levels takes no layer without its weight"
        weight = linear.weight.detach().float()
        if role == "output":
            out = self._inputs[name].float() @ weight.t()
            return out if linear.bias is None else out + linear.bias.detach().float()
        if role == "grad_input":
            return self._gradients[name].float() @ weight
        if role == "grad_weight":
            return self._gradients[name].float().t() @ self._inputs[name].float()
        return None


def emulated_operand(x: torch.Tensor, recipe: Recipe | None, role: str) -> torch.Tensor | None:
    """What an emulated recipe leaves of an operand [M, K] that no GEMM takes in codes; None where it leaves all of it.

    Args:
        role: "input", "weight" or "grad_output".
    """
    if recipe is None or not recipe.is_emulated or recipe.has_state:
        return None
    scaling = {"input": recipe.input, "weight": recipe.weight, "grad_output": recipe.grad_output}[role]
    if scaling is None:
        return None
    source = x.detach().to(torch.bfloat16) if role == "weight" else x.detach()
    if recipe.emulated:
        return emulate(source, recipe, role)
    return quantize(source, scaling).dequantize()


def _observe(model: M, levels: Levels, run: Callable[[M], torch.Tensor], observer: Callable[..., None]) -> float:
    """The loss of one forward and backward under observers."""
    for name, linear in model.named_modules():
        # rounding sends tokens to other experts, whose rows then have no counterpart
        if linear in levels.linears and isinstance(linear, Linear) and not isinstance(linear, GroupedLinear):
            linear.observer = functools.partial(observer, name, linear)
    try:
        return _backward(model, run)
    finally:
        for linear in levels.linears:
            linear.observer = None


def _backward(model: M, run: Callable[[M], torch.Tensor]) -> float:
    model.zero_grad(set_to_none=True)
    loss = run(model)
    loss.backward()
    return float(loss.detach())


def _rows(fp8: _Comparison, bf16: _Comparison) -> tuple[Departure, ...]:
    """Everything read from the device at once."""
    keys = list(fp8.accumulated)
    own = _to_host(fp8.own)
    accumulated, plain = _to_host(fp8.accumulated), _to_host(bf16.accumulated)
    return tuple(
        Departure(name, _ROLES[role], own.get((name, role)), accumulated[name, role], plain.get((name, role)))
        for name, role in keys
    )


def _to_host(values: Mapping[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], float]:
    if not values:
        return {}
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _below(db: float | None, threshold: float) -> bool:
    return db is not None and not db >= threshold


def _plain(row: Departure) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    return {key: _finite(value) if isinstance(value, float) else value for key, value in values.items()}


def _finite(value: float) -> float:
    return max(-999.0, min(999.0, value)) if value == value else -999.0
