"""Charts are valid XML, and whatever is drawn lies inside the box."""

import math
import xml.etree.ElementTree as ET

import pytest

from octavo.report.axes import LinearAxis, LogAxis
from octavo.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NUM_COLOURS,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    histogram,
    line_chart,
    smooth,
)


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == "svg"
    return root


def points(root: ET.Element) -> list[tuple[float, float]]:
    found = []
    for line in root.iter("polyline"):
        found += [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    found += [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter("circle")]
    return found


def assert_inside(root: ET.Element) -> None:
    for x, y in points(root):
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1
    for box in root.iter("rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= LEFT - 0.1
        assert x + width <= WIDTH - RIGHT + 0.6
        assert y >= TOP - 0.1
        assert y + height <= HEIGHT - BOTTOM + 0.1


RANGES = {
    "loss": [7.1, 5.2, 4.4, 3.9],
    "negative": [-3.0, 0.5, -0.25, 2.0],
    "flat": [2.5, 2.5, 2.5],
    "zeros": [0.0, 0.0],
    "tiny": [1e-9, 3e-9, 2e-9],
    "huge": [1e12, 4e12],
    "one": [0.3],
}


@pytest.mark.parametrize("values", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("log_y", [False, True], ids=["linear", "log"])
def test_lines_stay_inside(values: list[float], log_y: bool) -> None:
    if log_y:
        values = [abs(value) for value in values]
    line = Series("an <arm> & more", list(enumerate(values)), dashed=True, dots=True)
    root = parse(line_chart([line], title="a & b", x_label="step <n>", y_label="loss", log_y=log_y, from_zero=True))
    assert len(points(root)) == 2 * len(values)
    assert_inside(root)


def test_every_series_is_drawn_and_named() -> None:
    lines = [Series(f"arm {i}", [(0, i), (1, i + 1)]) for i in range(NUM_COLOURS)]
    root = parse(line_chart(lines, title="t", x_label="x", y_label="y"))
    assert len(list(root.iter("polyline"))) == NUM_COLOURS
    assert {f"arm {i}" for i in range(NUM_COLOURS)} <= {text.text for text in root.iter("text")}
    assert_inside(root)


def test_zero_has_its_own_line_on_a_log_axis() -> None:
    axis = LogAxis.around([0.0, 1e-4, 1e-2])
    assert axis.place(0.0) == 0.0 < axis.place(1e-4) < axis.place(1e-2) <= 1.0
    assert "0" in {tick.label for tick in axis.ticks()}
    assert "0" not in {tick.label for tick in LogAxis.around([1e-4, 1e-2]).ticks()}


@pytest.mark.parametrize("values", [[0.1, 0.7], [3.0, 9.0], [1234.0, 99999.0], [0.001, 0.0042], [-5.0, 5.0]])
def test_ticks_are_round_distinct_and_on_the_axis(values: list[float]) -> None:
    axis = LinearAxis.around(values)
    ticks = axis.ticks()
    assert 3 <= len(ticks) <= 9
    assert len({tick.label for tick in ticks}) == len(ticks)
    for tick in ticks:
        assert -1e-9 <= tick.place <= 1 + 1e-9
        value = float(tick.label.replace(",", ""))
        assert math.isclose(axis.place(value), tick.place, abs_tol=1e-6)


def test_histogram_has_a_bar_a_filled_bin() -> None:
    root = parse(histogram([5, 0, 120, 3], [0.0, 0.5, 1.0, 1.5, 2.0], title="w", x_label="w", y_label="n", log_y=True))
    assert len(list(root.iter("rect"))) == 3
    assert_inside(root)


def test_smooth_is_a_running_mean() -> None:
    assert smooth([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0, 1.0), (1, 2.0), (2, 4.0)]
