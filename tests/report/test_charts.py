"""Charts are valid XML, and whatever is drawn lies inside the box."""

import math
import xml.etree.ElementTree as ET

import pytest

from octavo.report.axes import LinearAxis, LogAxis
from octavo.report.charts import (
    FULL,
    NUM_COLOURS,
    RIGHT,
    SMALL,
    TOP,
    Series,
    Size,
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


def assert_inside(root: ET.Element, size: Size = FULL) -> None:
    assert root.attrib["viewBox"] == f"0 0 {size.width} {size.height}"
    right, low = size.width - RIGHT + 0.1, size.height - size.bottom + 0.1
    for x, y in points(root):
        assert size.left - 0.1 <= x <= right
        assert TOP - 0.1 <= y <= low
    for box in root.iter("rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= size.left - 0.1
        assert x + width <= right + 0.5
        assert y >= TOP - 0.1
        assert y + height <= low


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
@pytest.mark.parametrize("size", [FULL, SMALL], ids=["full", "small"])
def test_lines_stay_inside(values: list[float], log_y: bool, size: Size) -> None:
    if log_y:
        values = [abs(value) for value in values]
    line = Series("a <variant> & more", list(enumerate(values)), dashed=True, dots=True)
    labels = {"title": "a & b", "x_label": "step <n>", "y_label": "loss"}
    root = parse(line_chart([line], **labels, log_y=log_y, from_zero=True, size=size))
    assert len(points(root)) == 2 * len(values)
    assert_inside(root, size)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-0.5, 0.5], ["-0.6", "-0.4", "-0.2", "0", "0.2", "0.4", "0.6"]),
        ([0.0, 3e-9], ["0", "1e-09", "2e-09", "3e-09"]),
        ([0.0, 15000.0], ["0", "5,000", "10,000", "15,000"]),
    ],
)
def test_numbers_at_an_axis_are_short(values: list[float], labels: list[str]) -> None:
    assert [tick.label for tick in LinearAxis.around(values).ticks()] == labels


def test_what_stays_0_has_no_negative_numbers() -> None:
    axis = LinearAxis.around([0.0, 0.0], from_zero=True)
    assert (axis.low, axis.high) == (0.0, 1.0)


def test_every_series_is_drawn_and_named() -> None:
    lines = [Series(f"variant {i}", [(0, i), (1, i + 1)]) for i in range(NUM_COLOURS)]
    root = parse(line_chart(lines, title="t", x_label="x", y_label="y"))
    assert len(list(root.iter("polyline"))) == NUM_COLOURS
    assert {f"variant {i}" for i in range(NUM_COLOURS)} <= {text.text for text in root.iter("text")}
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
