"""Line charts and histograms as inline SVG. Colours are CSS variables of the page, so both themes are served."""

import dataclasses
from collections.abc import Sequence
from html import escape

from octavo.report.axes import LinearAxis, LogAxis, Tick

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
NUM_COLOURS = 5

# Everything that the page needs once; `c0` ... are the series' colours.
CHART_CSS = """
:root{--c0:#2563eb;--c1:#c2410c;--c2:#047857;--c3:#7c3aed;--c4:#be185d;--grid:#e3e6ea;--axis:#6b7280}
@media (prefers-color-scheme:dark){:root{--c0:#7db0ff;--c1:#ffa066;--c2:#5fd7a7;--c3:#c3a2ff;--c4:#ff8fc0;
--grid:#2d333b;--axis:#9aa4b2}}
svg.chart{width:100%;max-width:720px;height:auto;display:block;font:12px system-ui,sans-serif}
svg.chart text{fill:var(--axis)}svg.chart text.legend{fill:currentColor}
svg.chart .grid{stroke:var(--grid);stroke-width:1}
svg.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}
svg.chart .dashed{stroke-dasharray:6 4}
""" + "".join(
    f"svg.chart .line.s{i},svg.chart .dot.s{i}{{stroke:var(--c{i})}}"
    f"svg.chart .bar.s{i},svg.chart .dot.s{i}{{fill:var(--c{i})}}\n"
    for i in range(NUM_COLOURS)
)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line: its name in the legend, its points in order of x, and whether it is dashed or marked by dots."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    from_zero: bool = False,
) -> str:
    """Draw lines over common axes.

    Args:
        title: read out by screen readers; the page has its own headings.
        log_y: a logarithmic y axis; values of exactly zero are drawn on a line of their own below it.
        from_zero: the linear y axis includes 0.
    Returns:
        One `<svg>` element.
    """
    x_axis = LinearAxis.tight([x for line in series for x, _ in line.points])
    values = [y for line in series for _, y in line.points]
    y_axis = LogAxis.around(values) if log_y else LinearAxis.around(values, from_zero=from_zero)
    body = [_line(line, index, x_axis, y_axis) for index, line in enumerate(series)]
    frame = _frame(x_axis.ticks(), y_axis.ticks(), x_label, y_label)
    return _svg(title, [frame, *body, _legend([line.name for line in series])])


def histogram(
    counts: Sequence[float], edges: Sequence[float], *, title: str, x_label: str, y_label: str, log_y: bool = False
) -> str:
    """Draw bars over bins.

    Args:
        counts: one a bin. edges: rising, one more than counts.
        log_y: a logarithmic y axis; empty bins have no bar.
    """
    x_axis = LinearAxis.tight(edges)
    y_axis = LogAxis.around([0, *counts]) if log_y else LinearAxis.around(counts, from_zero=True)
    bars = []
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        left, right, top = _x(x_axis.place(low)), _x(x_axis.place(high)), _y(y_axis.place(count))
        if count > 0:
            box = f'x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 1, 0.5):.1f}" height="{_y(0) - top:.1f}"'
            bars.append(f'<rect class="bar s0" {box}><title>{low:.4g} to {high:.4g}: {count:,.6g}</title></rect>')
    return _svg(title, [_frame(x_axis.ticks(), y_axis.ticks(), x_label, y_label), *bars])


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """The running mean over the last `window` points, fewer at the start."""
    means, total = [], 0.0
    for i, (x, y) in enumerate(points):
        total += y - (points[i - window][1] if i >= window else 0.0)
        means.append((x, total / min(i + 1, window)))
    return means


def _x(place: float) -> float:
    return LEFT + place * (WIDTH - LEFT - RIGHT)


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def _line(line: Series, index: int, x_axis: LinearAxis, y_axis: LinearAxis | LogAxis) -> str:
    colour = f"s{index % NUM_COLOURS}"
    places = [(_x(x_axis.place(x)), _y(y_axis.place(y))) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline class="line {colour}{" dashed" if line.dashed else ""}" points="{path}"/>'
    if not line.dots and len(places) > 1:
        return drawn
    dots = (
        f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(line.name)}, '
        f"{point[0]:g}: {point[1]:.4g}</title></circle>"
        for (x, y), point in zip(places, line.points, strict=True)
    )
    return drawn + "".join(dots)


def _frame(x_ticks: list[Tick], y_ticks: list[Tick], x_label: str, y_label: str) -> str:
    parts = []
    for tick in y_ticks:
        y = _y(tick.place)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick.label}</text>')
    for tick in x_ticks:
        x = _x(tick.place)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick.label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + HEIGHT - BOTTOM) / 2
    turn = f'transform="rotate(-90 14 {centre:.1f})"'
    parts.append(f'<text x="14" y="{centre:.1f}" text-anchor="middle" {turn}>{escape(y_label)}</text>')
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts, x = [], float(LEFT)
    for index, name in enumerate(names):
        parts.append(f'<line class="line s{index % NUM_COLOURS}" x1="{x:.0f}" y1="14" x2="{x + 18:.0f}" y2="14"/>')
        parts.append(f'<text class="legend" x="{x + 24:.0f}" y="18">{escape(name)}</text>')
        x += 44 + 6.4 * len(name)
    return "".join(parts)


def _svg(title: str, parts: Sequence[str]) -> str:
    opening = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
    return opening + f"<title>{escape(title)}</title>" + "".join(parts) + "</svg>"
