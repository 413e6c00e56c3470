"""Line charts and histograms as inline SVG. Colours are CSS variables of the page, so both themes are served."""

import dataclasses
from collections.abc import Sequence
from html import escape

from octavo.report.axes import LinearAxis, LogAxis, Tick

RIGHT, TOP = 16, 34
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
class Size:
    """A chart's outer size and what it leaves for labels, in the units of its text, which is 12 high.

    Attributes:
        left: for the y axis's numbers and label.
        bottom: for the x axis's.
    """

    width: int
    height: int
    left: int = 64
    bottom: int = 44

    def x(self, place: float) -> float:
        """Where a place from 0 to 1 on the x axis is drawn."""
        return self.left + place * (self.width - self.left - RIGHT)

    def y(self, place: float) -> float:
        """Where a place from 0 to 1 on the y axis is drawn."""
        return self.height - self.bottom - place * (self.height - TOP - self.bottom)


FULL = Size(640, 300)
SMALL = Size(480, 212, left=58, bottom=40)  # two stand side by side


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
    x_range: tuple[float, ...] = (),
    size: Size = FULL,
) -> str:
    """Draw lines over common axes.

    Args:
        title: read out by screen readers; the page has its own headings.
        y_label: may be empty, where the heading says it.
        log_y: a logarithmic y axis; values of exactly zero are drawn on a line of their own below it.
        from_zero: the linear y axis includes 0.
        x_range: values that the x axis includes, lest charts side by side differ in it.
    Returns:
        One `<svg>` element.
    """
    x_axis = LinearAxis.tight([*x_range, *(x for line in series for x, _ in line.points)])
    values = [y for line in series for _, y in line.points]
    y_axis = LogAxis.around(values) if log_y else LinearAxis.around(values, from_zero=from_zero)
    body = [_line(line, index, x_axis, y_axis, size) for index, line in enumerate(series)]
    frame = _frame(x_axis.ticks(), y_axis.ticks(), x_label, y_label, size)
    return _svg(title, [frame, *body, _legend([line.name for line in series], size)], size)


def histogram(
    counts: Sequence[float], edges: Sequence[float], *, title: str, x_label: str, y_label: str, log_y: bool = False
) -> str:
    """Draw bars over bins.

    Args:
        counts: one a bin.
        edges: rising, one more than counts.
        log_y: a logarithmic y axis; empty bins have no bar.
    """
    x_axis = LinearAxis.tight(edges)
    y_axis = LogAxis.around([0, *counts]) if log_y else LinearAxis.around(counts, from_zero=True)
    bars = []
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        left, right, top = FULL.x(x_axis.place(low)), FULL.x(x_axis.place(high)), FULL.y(y_axis.place(count))
        if count > 0:
            width, height = max(right - left - 1, 0.5), FULL.y(0) - top
            box = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
            bars.append(f'<rect class="bar s0" {box}><title>{low:.4g} to {high:.4g}: {count:,.6g}</title></rect>')
    return _svg(title, [_frame(x_axis.ticks(), y_axis.ticks(), x_label, y_label, FULL), *bars], FULL)


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """The running mean over the last `window` points, fewer at the start."""
    means, total = [], 0.0
    for i, (x, y) in enumerate(points):
        total += y - (points[i - window][1] if i >= window else 0.0)
        means.append((x, total / min(i + 1, window)))
    return means


def _line(line: Series, index: int, x_axis: LinearAxis, y_axis: LinearAxis | LogAxis, size: Size) -> str:
    colour = f"s{index % NUM_COLOURS}"
    places = [(size.x(x_axis.place(x)), size.y(y_axis.place(y))) for x, y in line.points]
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


def _frame(x_ticks: list[Tick], y_ticks: list[Tick], x_label: str, y_label: str, size: Size) -> str:
    parts = []
    for tick in y_ticks:
        y = size.y(tick.place)
        parts.append(f'<line class="grid" x1="{size.left}" y1="{y:.1f}" x2="{size.width - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{size.left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick.label}</text>')
    for tick in x_ticks:
        x, y = size.x(tick.place), size.y(0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick.label}</text>')
    below = f'x="{size.x(0.5):.1f}" y="{size.height - 6}"'
    parts.append(f'<text {below} text-anchor="middle">{escape(x_label)}</text>')
    if y_label:
        middle = size.y(0.5)
        turn = f'transform="rotate(-90 14 {middle:.1f})"'
        parts.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turn}>{escape(y_label)}</text>')
    return "".join(parts)


def _legend(names: Sequence[str], size: Size) -> str:
    parts, x = [], float(size.left)
    for index, name in enumerate(names):
        parts.append(f'<line class="line s{index % NUM_COLOURS}" x1="{x:.0f}" y1="14" x2="{x + 18:.0f}" y2="14"/>')
        parts.append(f'<text class="legend" x="{x + 24:.0f}" y="18">{escape(name)}</text>')
        x += 44 + 6.4 * len(name)
    return "".join(parts)


def _svg(title: str, parts: Sequence[str], size: Size) -> str:
    box, label = f'viewBox="0 0 {size.width} {size.height}"', escape(title, quote=True)
    opening = f'<svg class="chart" {box} role="img" aria-label="{label}">'
    return opening + f"<title>{escape(title)}</title>" + "".join(parts) + "</svg>"
