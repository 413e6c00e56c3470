"""Draws where tensors fall in a format's range: one row a tensor, its exponents over the format's bands.

The only file of numerics/ that uses matplotlib, which it imports when it is called.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.errors import BackendError, ConfigError, install_extra
from octavo.numerics.analysis import TensorReport
from octavo.numerics.formats import FloatFormat

_BAND_COLORS = {"underflow": "#f4b6b0", "subnormal": "#fbe3a6", "normal": "#cfe8cf", "saturated": "#d6c6ea"}
_LOWEST_EXPONENT = -40  # smaller elements are drawn here
_ROW_INCHES = 0.36
_MAX_INCHES = 200.0  # matplotlib refuses figures of more than 2**16 pixels


def plot_exponents(reports: Sequence[TensorReport], path: str | Path) -> None:
    """Draw the share of each tensor's elements at every exponent, after scaling, over the format's bands.

    Elements in the red band become zero, in the yellow one they keep fewer mantissa bits, in the violet one they are
    clipped. A tensor that lies in the green band loses rounding only.

    Args:
        reports: from analyze or analyze_model; formats may be mixed.
        path: where to write, folders made as needed; the suffix picks the kind (.png, .svg, .pdf).
    Raises:
        BackendError: without matplotlib.
        ConfigError: for no reports, or a suffix that matplotlib cannot write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(f"plot_exponents needs matplotlib; {install_extra('plots')}") from error
    if not reports:
        raise ConfigError("plot_exponents needs at least one report, got none")
    height = min(1.6 + _ROW_INCHES * len(reports), _MAX_INCHES)
    figure = Figure(figsize=(10.0, height), layout="constrained")
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"cannot draw to {str(path)!r}: the name must end in .png, .svg or .pdf")
    axes, names = figure.add_subplot(), [report.name or "-" for report in reports]
    low, high = _limits(reports)
    for row, report in enumerate(reports):
        _draw_row(axes, row, report, low, high)
    axes.set_xlim(low, high)
    axes.set_ylim(len(reports) - 0.5, -0.5)  # first report on top
    axes.set_yticks(range(len(reports)), names, fontsize=8, parse_math=False)
    axes.set_xlabel("exponent of |x * quant_scale|, in powers of two")
    axes.set_title("share of elements by exponent, against the format's range", fontsize=10)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format=kind)


def bands(fmt: FloatFormat) -> dict[str, tuple[float, float]]:
    """Where a format's bands lie, as (low, high) exponents: underflow, subnormal, normal, saturated.

    Underflow ends at half the smallest subnormal, which still rounds to zero; all above it rounds up.
    """
    zero = math.log2(fmt.min_subnormal) - 1.0
    normal, top = math.log2(fmt.min_normal), math.log2(fmt.max)
    return {
        "underflow": (-math.inf, zero),
        "subnormal": (zero, normal),
        "normal": (normal, top),
        "saturated": (top, math.inf),
    }


def _limits(reports: Sequence[TensorReport]) -> tuple[int, int]:
    """The exponents drawn: every band, and every element that is not below _LOWEST_EXPONENT."""
    edges = [bands(report.format) for report in reports]
    low = min(int(edge["underflow"][1]) - 4 for edge in edges)
    high = max(math.ceil(edge["saturated"][0]) + 2 for edge in edges)
    seen = [exponent for report in reports for exponent in report.histogram]
    return max(min([low, *seen]), _LOWEST_EXPONENT), max([high, *(e + 1 for e in seen)])


def _draw_row(axes: Any, row: int, report: TensorReport, low: int, high: int) -> None:
    top, bottom = row - 0.5, row + 0.45
    for name, (start, stop) in bands(report.format).items():
        start, stop = max(start, low), min(stop, high)
        axes.fill_between([start, stop], top, bottom, color=_BAND_COLORS[name], linewidth=0)
    drawn: dict[int, int] = {}
    for exponent, count in report.histogram.items():
        at = max(exponent, low)
        drawn[at] = drawn.get(at, 0) + count
    peak = max(drawn.values(), default=1)
    # square root: a share of one percent stays visible
    heights = [0.85 * math.sqrt(count / peak) for count in drawn.values()]
    axes.bar(list(drawn), [-h for h in heights], width=0.9, bottom=bottom, align="edge", color="#30507a", linewidth=0)
    text = f"{report.sqnr_db:.1f} dB, {100 * report.underflow:.2g} % lost"
    axes.text(1.01, row, text, fontsize=7, va="center", transform=axes.get_yaxis_transform())


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    meaning = {
        "underflow": "underflow: becomes zero",
        "subnormal": "subnormal: fewer bits",
        "normal": "normal",
        "saturated": "above the largest value",
    }
    return [Patch(color=_BAND_COLORS[name], label=label) for name, label in meaning.items()]
