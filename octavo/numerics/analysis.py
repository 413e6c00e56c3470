"""How much of a tensor an 8-bit format keeps: SQNR, underflow, saturation, subnormals; as reports and as a table.

Run it on weights, activations or gradients before training in FP8. analysis_plot.py draws the same reports.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from octavo.errors import RecipeError, ShapeError
from octavo.numerics.formats import FloatFormat, format_of
from octavo.numerics.quantized import expand_scale
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.numerics.scaling import (
    Scaling,
    block_amax,
    check_known_scale,
    check_matrix,
    compute_quant_scale,
    encode,
    reciprocal,
)

_CHUNK_ELEMENTS = 1 << 22  # bounds the temporaries to some 100 MB whatever the tensor's size
_CHUNK_ROWS = 128  # a multiple of every block's rows, so that chunks never cut a block
_FP32_TINY = 2.0**-149  # the smallest positive fp32

# What a normal tensor gives is 31.5 dB in E4M3 and 25.5 dB in E5M2; a note appears this far below it.
_SQNR_SLACK_DB = 3.0
_NOTED_UNDERFLOW = 0.01


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """What quantizing one tensor loses. Shares are of all elements, from 0 to 1.

    Attributes:
        name: of the tensor.
        shape: of the tensor.
        numel: of the tensor.
        scaling: how it was quantized.
        amax: max|x|, NaN ignored.
        dynamic_range: log2(largest / smallest nonzero magnitude), in powers of two; finite elements only.
        underflow: share of nonzero elements' codes that are zero.
        saturation: share with |x * quant_scale| above the format's largest value, if only by rounding.
        num_clipped: how many of these saturation moved, by more than half a unit in the last place.
        subnormal: share of subnormal codes (fewer mantissa bits than promised).
        zeros: share that was zero before.
        num_nonfinite: how many elements are inf or NaN.
        sqnr_db: signal to quantization noise; -inf where an element is not finite.
        mse: mean squared error; inf where an element is not finite.
        mean_relative_error: of |x - decoded| / |x| over finite nonzero elements.
        max_relative_error: of |x - decoded| / |x| over finite nonzero elements.
        scale_min: of the decode scales.
        scale_max: of the decode scales.
        histogram: exponent e -> how many finite nonzero elements have 2**e <= |x * quant_scale| < 2**(e + 1);
            -127 holds everything below too.
    """

    name: str
    shape: tuple[int, int]
    numel: int
    scaling: Scaling
    amax: float
    dynamic_range: float
    underflow: float
    saturation: float
    num_clipped: int
    subnormal: float
    zeros: float
    num_nonfinite: int
    sqnr_db: float
    mse: float
    mean_relative_error: float
    max_relative_error: float
    scale_min: float
    scale_max: float
    histogram: Mapping[int, int]

    @property
    def format(self) -> FloatFormat:
        """The 8-bit format's facts."""
        return format_of(self.scaling.dtype)

    @property
    def scale_inv_min(self) -> float:
        """TransformerEngine's name of scale_min."""
        return self.scale_min

    @property
    def scale_inv_max(self) -> float:
        """TransformerEngine's name of scale_max."""
        return self.scale_max

    @property
    def te_stats(self) -> dict[str, float]:
        """The statistics that TransformerEngine's debug tools log, under its names."""
        return {
            "cur_amax": self.amax,
            "dynamic_range": self.dynamic_range,
            "underflows%": 100.0 * self.underflow,
            "overflows%": 100.0 * self.num_clipped / max(self.numel, 1),
            "scale_inv_min": self.scale_min,
            "scale_inv_max": self.scale_max,
            "mse": self.mse,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Why FP8 may hurt this tensor, in words; empty where nothing stands out."""
        notes = []
        if self.num_nonfinite:
            notes.append(f"{self.num_nonfinite} non-finite")
        if self.num_clipped:
            notes.append(f"{self.num_clipped} clipped")
        if self.underflow >= _NOTED_UNDERFLOW:
            notes.append("small values lost")
        if not self.num_nonfinite and self.sqnr_db < 13.5 + 6.0 * self.format.mantissa_bits - _SQNR_SLACK_DB:
            notes.append("low SQNR")
        return tuple(notes)


def sqnr(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantization noise, 20 * log10(|reference| / |reference - approximation|), in fp64.

    Args:
        reference: any dtype, 8-bit floats included.
        approximation: the same shape, any dtype.
    Returns:
        dB; inf where the two are equal, -inf where they differ and either holds an inf or a NaN, so that no threshold
        is passed by a tensor that has gone bad.
    Raises:
        ShapeError: if the shapes differ.
    """
    if reference.shape != approximation.shape:
        raise ShapeError(
            f"sqnr compares tensors of one shape, got {tuple(reference.shape)} and {tuple(approximation.shape)}"
        )
    # 8-bit floats have no arithmetic in torch; fp32 holds each of their values
    reference, approximation = (t.float() if t.element_size() == 1 else t for t in (reference, approximation))
    reference, approximation = reference.detach().double(), approximation.detach().double()
    if torch.equal(reference, approximation):
        return math.inf
    signal = float(reference.square().sum())
    return _decibels(signal, float((reference - approximation).square().sum()))


def _decibels(signal: float, noise: float) -> float:
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -math.inf
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def analyze(x: torch.Tensor, scaling: Scaling, name: str = "", quant_scale: torch.Tensor | None = None) -> TensorReport:
    """Quantize a matrix by the contract and report what is lost.

    Args:
        x: [M, K] fp32, bf16 or fp16.
        scaling: how; see Scaling.
        name: what the report is called.
        quant_scale: a known quant_scale (delayed scaling), fp32 scalar, per tensor only; None: from x's own amax.
    Raises:
        ShapeError: if x is no matrix, or quant_scale is given for blocks.
        DtypeError: if x has another dtype.
    Exactness: the codes are quantize's, bit for bit.
    """
    check_matrix(x, "x")
    x = x.detach()
    amax = block_amax(x, scaling.block_size)  # [ceil(M/bm), ceil(K/bk)]
    if quant_scale is None:
        quant_scale = compute_quant_scale(amax, scaling, x.dtype)
    else:
        check_known_scale(quant_scale, scaling)
        quant_scale = quant_scale.detach().float().reshape(1, 1)
    tally = _Tally()
    for rows, scales in _chunks(x, quant_scale, scaling):
        tally.add(rows, expand_scale(scales, scaling.block_size, rows.shape), scaling.dtype)
    return _report(name, x, scaling, amax, reciprocal(quant_scale), tally)


def _report(
    name: str, x: torch.Tensor, scaling: Scaling, amax: torch.Tensor, scale: torch.Tensor, tally: "_Tally"
) -> TensorReport:
    numel = x.numel()
    num_used = numel - tally.num_zero - tally.num_nonfinite
    is_finite = tally.num_nonfinite == 0
    return TensorReport(
        name=name,
        shape=(x.shape[0], x.shape[1]),
        numel=numel,
        scaling=scaling,
        amax=float(amax.max()) if amax.numel() else 0.0,
        dynamic_range=math.log2(tally.largest / tally.smallest) if num_used else 0.0,
        underflow=tally.num_underflow / max(numel, 1),
        saturation=tally.num_beyond / max(numel, 1),
        num_clipped=tally.num_clipped,
        subnormal=tally.num_subnormal / max(numel, 1),
        zeros=tally.num_zero / max(numel, 1),
        num_nonfinite=tally.num_nonfinite,
        sqnr_db=_decibels(tally.signal, tally.noise) if is_finite else -math.inf,
        mse=tally.noise / max(numel, 1) if is_finite else math.inf,
        mean_relative_error=tally.relative_error / max(num_used, 1),
        max_relative_error=tally.max_relative_error,
        scale_min=float(scale.min()) if scale.numel() else 1.0,
        scale_max=float(scale.max()) if scale.numel() else 1.0,
        histogram=dict(sorted(tally.histogram.items())),
    )


def _chunks(
    x: torch.Tensor, quant_scale: torch.Tensor, scaling: Scaling
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows of x, their quant_scales), a bounded number of elements at a time."""
    rows, cols = x.shape
    step = max(_CHUNK_ELEMENTS // max(cols, 1) // _CHUNK_ROWS, 1) * _CHUNK_ROWS
    bm = scaling.block_size[0]
    for start in range(0, rows, step) if cols else ():
        stop = min(start + step, rows)
        yield x[start:stop], quant_scale if bm == -1 else quant_scale[start // bm : -(-stop // bm)]


@dataclasses.dataclass
class _Tally:
    """Counts, sums and extremes, chunk after chunk; errors and extremes are over finite nonzero elements."""

    num_zero: int = 0
    num_nonfinite: int = 0
    num_underflow: int = 0
    num_subnormal: int = 0
    num_beyond: int = 0
    num_clipped: int = 0
    signal: float = 0.0
    noise: float = 0.0
    relative_error: float = 0.0
    max_relative_error: float = 0.0
    largest: float = 0.0
    smallest: float = math.inf
    histogram: Counter[int] = dataclasses.field(default_factory=Counter)

    def add(self, x: torch.Tensor, quant_scale: torch.Tensor, dtype: torch.dtype) -> None:
        """Count a chunk: x [m, K], quant_scale [m, K] fp32."""
        codes = encode(x, quant_scale, dtype)
        decoded = codes.float() * reciprocal(quant_scale)
        code_magnitude = codes.view(torch.uint8).flatten() & 0x7F
        x = x.float()
        finite = torch.isfinite(x)
        if num_nonfinite := x.numel() - int(finite.sum()):
            x, decoded = torch.where(finite, x, 0.0), torch.where(finite, decoded, 0.0)
            code_magnitude = code_magnitude[finite.flatten()]
        num_zero = x.numel() - int(x.count_nonzero())  # with those that are not finite
        self.num_nonfinite += num_nonfinite
        self.num_zero += num_zero - num_nonfinite
        self._count_codes(code_magnitude, num_zero - num_nonfinite, format_of(dtype))
        self._count_scaled(x.abs() * quant_scale, num_zero, format_of(dtype))
        self._add_errors(x.abs(), (x - decoded).abs_())

    def _count_codes(self, magnitude: torch.Tensor, num_zero: int, fmt: FloatFormat) -> None:
        num_codes = torch.bincount(magnitude, minlength=128).tolist()
        self.num_underflow += num_codes[0] - num_zero
        self.num_subnormal += sum(num_codes[1 : 1 << fmt.mantissa_bits])

    def _count_scaled(self, scaled: torch.Tensor, num_zero: int, fmt: FloatFormat) -> None:
        half_ulp = 2.0 ** (math.frexp(fmt.max)[1] - 2 - fmt.mantissa_bits)
        self.num_beyond += int((scaled > fmt.max).sum())
        self.num_clipped += int((scaled > fmt.max + half_ulp).sum())
        self.histogram.update(_exponents(scaled, num_zero))

    def _add_errors(self, magnitude: torch.Tensor, error: torch.Tensor) -> None:
        relative = error / magnitude.clamp_min(_FP32_TINY)  # zeros have no error
        self.signal += _energy(magnitude)
        self.noise += _energy(error)
        self.relative_error += float(relative.sum(dtype=torch.float64))
        self.max_relative_error = max(self.max_relative_error, float(relative.amax()))
        self.largest = max(self.largest, float(magnitude.amax()))
        self.smallest = min(self.smallest, float(torch.where(magnitude == 0, math.inf, magnitude).amin()))


def _energy(x: torch.Tensor) -> float:
    """Sum of squares in fp64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _exponents(scaled: torch.Tensor, num_zero: int) -> dict[int, int]:
    """Exponent -> count of fp32 values >= 0, less num_zero zeros; inf counts as 127, all below the normals as -127."""
    biased = (scaled.view(torch.int32) >> 23).clamp_max(254).to(torch.uint8)  # an fp32's exponent field
    bins = torch.bincount(biased.flatten(), minlength=255).tolist()
    bins[0] -= num_zero
    return {i - 127: n for i, n in enumerate(bins) if n}


def analyze_model(module: torch.nn.Module, scaling: Scaling | Recipe | str) -> list[TensorReport]:
    """Report on every 2-D parameter, from its bf16 value, as the contract quantizes weights.

    Embeddings and heads are listed too, though a recipe leaves them in high precision unless asked. Fused projections
    are reported one by one, as they are scaled.

    Args:
        module: any torch module.
        scaling: a Scaling, or a recipe (or its name), whose weight scaling is used.
    Returns:
        One report a weight, in the module's order.
    Raises:
        RecipeError: for a recipe that quantizes no weight.
    """
    if not isinstance(scaling, Scaling):
        recipe = get_recipe(scaling)
        if recipe.weight is None:
            raise RecipeError(f"recipe {recipe.name!r} quantizes no weight; analyze an FP8 recipe or a Scaling")
        scaling = recipe.weight
    return [analyze(weight.detach().to(torch.bfloat16), scaling, name) for name, weight in _weights(module)]


def _weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every 2-D parameter once; the projections of a fused one (octavo.nn.Linear.parts) apart, as they are scaled."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.dim() != 2 or not parameter.is_floating_point() or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{key}" if prefix else key
            parts = tuple(getattr(owner, "parts", ()))
            if len(parts) > 1 and key == "weight":
                yield from ((f"{name}[{i}]", part) for i, part in enumerate(parameter.split(parts)))
            else:
                yield name, parameter


_COLUMNS = (
    "tensor",
    "shape",
    "scaling",
    "amax",
    "range",
    "SQNR dB",
    "underflow %",
    "subnormal %",
    "clipped",
    "zeros %",
    "mean err %",
    "max err %",
    "note",
)


def format_table(reports: Iterable[TensorReport]) -> str:
    """The reports as aligned text, one line each under a header; `range` is in powers of two."""
    lines = [_COLUMNS, *(_cells(report) for report in reports)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    is_text = [name in ("tensor", "shape", "scaling", "note") for name in _COLUMNS]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in lines
    )


def _cells(report: TensorReport) -> tuple[str, ...]:
    scaling = report.scaling
    return (
        report.name or "-",
        "x".join(map(str, report.shape)),
        f"{report.format.name} {scaling.kind}" + (" e8m0" if scaling.scale_format == "e8m0" else ""),
        f"{report.amax:.3g}",
        f"{report.dynamic_range:.1f}",
        f"{report.sqnr_db:.1f}",
        f"{100 * report.underflow:.3f}",
        f"{100 * report.subnormal:.3f}",
        str(report.num_clipped),
        f"{100 * report.zeros:.2f}",
        f"{100 * report.mean_relative_error:.2f}",
        f"{100 * report.max_relative_error:.1f}",
        ", ".join(report.notes) or "ok",
    )
