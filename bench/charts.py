"""Every chart of bench: records and curves as SVG that is the same for the same figures.

matplotlib is imported when one is drawn.
"""

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figures, split_case
from bench.report import STEP_TIME
from octavo.errors import BackendError, install_extra

_COLORS = ("#30507a", "#c2410c", "#047857", "#7c3aed", "#be185d", "#6b7280", "#a16207", "#0891b2")
_BASE_COLOR = "#9aa4b2"
_LATENCIES = {"time to first token": "s", "inter-token latency": "ms"}
_PERCENTILES = (50, 90, 99)
_SMOOTH = 5  # points in a running mean
_FLOOR = 1e-6  # nats; below it the axis of the mismatch is linear, so that 0 has a place
Curve = dict[str, Any]


def bars(path: Path, values: Mapping[str, float], *, title: str, label: str, line_at: float | None = None) -> None:
    """One horizontal bar a name, its number at its end; octavo's stand out."""
    figure, axes = _figure(9.0, 1.2 + 0.3 * len(values))
    _draw_bars(axes, values, label)
    if line_at is not None:
        axes.axvline(line_at, color="black", linewidth=0.8, linestyle="--")
    _save(figure, axes, path, title)


def lines(
    path: Path,
    series: Mapping[str, Sequence[tuple[Any, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    joined: bool = True,
) -> None:
    """One line, or cloud of points, a name over common axes; 1 is marked."""
    figure, axes = _figure(9.0, 4.5)
    for index, (name, points) in enumerate(series.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        style = {"marker": "o", "markersize": 4, "linestyle": "-" if joined else "none"}
        axes.plot(xs, ys, color=_COLORS[index % 6], label=name, **style)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#e3e6ea")
    axes.legend(fontsize=8)
    _save(figure, axes, path, title)


def curves_over_gpus(
    path: Path,
    measured: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    expected: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    *,
    title: str,
) -> None:
    """Panels side by side over the number of GPUs, one for each label of `measured`: a line a name, and what was
    expected of it dotted."""
    figure = _empty_figure(11.0, 4.2)
    for axes, label in zip(figure.subplots(1, len(measured)), measured, strict=True):
        for index, (name, points) in enumerate(measured[label].items()):
            axes.plot(*zip(*points, strict=True), color=_COLORS[index], marker="o", markersize=4, label=name)
            dotted = expected[label].get(name)
            if dotted:
                axes.plot(*zip(*dotted, strict=True), color=_COLORS[index], marker="o", markersize=3, linestyle=":")
        axes.set_xscale("log", base=2)
        ticks = sorted({x for each in (measured, expected) for points in each[label].values() for x, _ in points})
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.set_xlabel("GPUs")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(color="#e3e6ea")
    axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    _write(figure, path)


# Benchmarks whose chart is a bar a case: the metric, the title, what the bars' numbers are.
_BARS = {
    "step": (STEP_TIME, "a training step", "ms a step"),
    "layer": ("time", "one layer, forward and backward", "ms"),
    "gemm": ("rate", "products", "TFLOP/s"),
    "quant": (
        "share of copy bandwidth",
        "bytes of the floor over time, against a copy",
        "share of a copy's bandwidth",
    ),
    "capacity": ("most tokens a step", "what one card holds", "tokens a step"),
    "qdq": ("time", "blocks with Q/DQ pairs", "µs"),
}


def plot_bars(name: str, figures: Figures, path: Path) -> None:
    """A bar a case."""
    metric, title, label = _BARS[name]
    bars(path, _values(figures, metric), title=title, label=label)


def plot_sizes(figures: Figures, path: Path) -> None:
    """Speedup over the fastest bf16 by model size."""
    series: dict[str, list[tuple[str, float]]] = {}
    for case in figures.cases:
        size, variant = split_case(case)
        value = figures.value(case, "speedup")
        if value is not None and "octavo" in variant:
            series.setdefault(variant, []).append((size, value))
    x_label, y_label = "model whose layers these are", "speedup over bf16"
    lines(path, series, title="a training step by model size", x_label=x_label, y_label=y_label)


def plot_linear(figures: Figures, path: Path) -> None:
    """Speedup of each shape over bf16, replayed from a graph, by the work in it."""
    series: dict[str, list[tuple[float, float]]] = {}
    for case in figures.cases:
        shape, variant = split_case(case)
        value = figures.value(case, "speedup, graph")
        if value is not None and variant.startswith("octavo") and "cached" not in variant:
            tokens, cols, rows = (int(size) for size in shape.split("x"))
            series.setdefault(variant, []).append((6e-9 * tokens * cols * rows, value))
    x_label, y_label = "GFLOP, forward and backward", "speedup over bf16"
    title = "one linear, from a CUDA graph"
    lines(path, series, title=title, x_label=x_label, y_label=y_label, log_x=True, joined=False)


def plot_serve(figures: Figures, path: Path) -> None:
    """Output tokens a second, vLLM's beside where it is known; percentiles of both latencies."""
    throughput: dict[str, float] = {}
    for case, value in _values(figures, "output throughput").items():
        throughput[case] = value
        peer_value = figures.value(case, "output throughput", "peer_value")
        if peer_value is not None:
            workload, _, variant = case.partition(": octavo ")
            throughput[f"{workload}: vLLM beside {variant}"] = peer_value
    figure, panels = _panels([len(throughput), *[len(_values(figures, f"{name}, p50")) for name in _LATENCIES]])
    _draw_bars(panels[0], throughput, "output tokens/s")
    for axes, (name, unit) in zip(panels[1:], _LATENCIES.items(), strict=True):
        _draw_percentiles(axes, figures, name, f"{name}, {unit}")
    _save(figure, panels[0], path, "serving")


def plot_rl(figures: Figures, path: Path) -> None:
    """Output tokens a second, milliseconds of a refit and seconds a step, as far as the record has them."""
    asked = {"output throughput": "output tokens/s", "refit, both layouts": "ms a refit", "step time": "s a step"}
    found = {label: values for metric, label in asked.items() if (values := _values(figures, metric))}
    figure, panels = _panels([len(values) for values in found.values()])
    for axes, (label, values) in zip(panels, found.items(), strict=True):
        _draw_bars(axes, values, label)
    _save(figure, panels[0], path, "reinforcement learning")


PLOTS: dict[str, Callable[[Figures, Path], None]] = {
    **{name: functools.partial(plot_bars, name) for name in _BARS},
    "linear": plot_linear,
    "sizes": plot_sizes,
    "serve": plot_serve,
    "rl": plot_rl,
}


def plot_pretraining(
    path: Path, curves: Sequence[Curve], title: str, *, base: str, labels: Mapping[str, str], points_of: int
) -> None:
    """Training loss on the left; on the right each variant's difference to the base's on the same batches, in percent.

    Args:
        labels: of the variants.
        points_of: steps that a point of a curve is the mean of.
    """

    def draw(axes: Any, values: Sequence[float], variant: str, color: str, width: float) -> None:
        steps = [points_of * (i + 1) for i in range(len(values))]
        axes.plot(steps, values, color=color, label=labels[variant], linewidth=width)

    with _two_panels(path, title, curves) as (left, right, colors):
        gaps = {variant: smoothed(mean_gaps(curves, variant, base)) for variant in colors}
        for variant, color in colors.items():
            draw(left, mean_losses(curves, variant), variant, color, 1.1)
            if variant != base and gaps[variant]:
                draw(right, gaps[variant], variant, color, 1.3)
        left.set_ylabel("training loss, nats a token")
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("{x:g}")
        right.axhline(0.0, color="black", linewidth=0.8, linestyle="--")
        right.set_ylabel(f"difference to {base}, %")
        _limit_gaps(right, [gaps[variant] for variant in colors if variant != base])
        right.legend(fontsize=8)


def plot_learning(path: Path, curves: Sequence[Curve], title: str) -> None:
    """Held-out reward, and mean difference of logprobs, over steps: means over seeds, each seed thin behind."""
    with _two_panels(path, title, curves) as (left, right, colors):
        for variant, color in colors.items():
            mine = [curve for curve in curves if curve["variant"] == variant]
            _draw_seeds(left, [curve["held_out"] for curve in mine], variant, color)
            _draw_seeds(right, [list(zip(curve["step"], curve["diff"], strict=True)) for curve in mine], variant, color)
        left.set_ylabel("held-out reward, bf16 and greedy")
        right.set_ylabel("mean |trainer's - sampler's logprob|, nats")
        right.set_yscale("symlog", linthresh=_FLOOR)
        right.set_ylim(bottom=0.0)


def mean_losses(curves: Sequence[Curve], variant: str) -> list[float]:
    """A variant's training loss, mean over its seeds."""
    mine = [curve["loss"] for curve in curves if curve["variant"] == variant]
    return [statistics.fmean(values) for values in zip(*mine, strict=True)]


def mean_gaps(curves: Sequence[Curve], variant: str, base: str) -> list[float]:
    """A variant's difference to the base in percent, paired by seed, mean over the seeds; empty without a pair."""
    bases = {curve["seed"]: curve["loss"] for curve in curves if curve["variant"] == base}
    gaps = [
        [100.0 * (mine / theirs - 1.0) for mine, theirs in zip(curve["loss"], bases[curve["seed"]], strict=True)]
        for curve in curves
        if curve["variant"] == variant and curve["seed"] in bases
    ]
    return [statistics.fmean(values) for values in zip(*gaps, strict=True)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over the last _SMOOTH points, fewer at the start."""
    return [statistics.fmean(values[max(0, i + 1 - _SMOOTH) : i + 1]) for i in range(len(values))]


def _values(figures: Figures, metric: str) -> dict[str, float]:
    values = {case: figures.value(case, metric) for case in figures.cases}
    return {case: value for case, value in values.items() if value is not None}


def _draw_bars(axes: Any, values: Mapping[str, float], label: str) -> None:
    names = list(values)
    colors = [_COLORS[0] if "octavo" in name else _BASE_COLOR for name in names]
    drawn = axes.barh(range(len(names)), list(values.values()), color=colors)
    axes.bar_label(drawn, fmt="{:.4g}", fontsize=8, padding=3)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.12)


def _draw_percentiles(axes: Any, figures: Figures, name: str, label: str) -> None:
    """A line of three points a case: p50, p90 and p99 of a latency."""
    cases = list(_values(figures, f"{name}, p50"))
    for place, case in enumerate(cases):
        values = [figures.value(case, f"{name}, p{percent}") for percent in _PERCENTILES]
        axes.plot(values, [place] * len(values), color=_COLORS[0], marker="|", markersize=8)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"{label}: {', '.join(f'p{percent}' for percent in _PERCENTILES)}")
    axes.grid(axis="x", color="#e3e6ea")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = _empty_figure(width, height)
    return figure, figure.add_subplot()


def _panels(num_lines: Sequence[int]) -> tuple[Any, Sequence[Any]]:
    """Axes one above the other, each as high as its lines need."""
    heights = [1.0 + 0.3 * count for count in num_lines]
    figure = _empty_figure(11.0, sum(heights))
    return figure, list(figure.subplots(len(heights), height_ratios=heights, squeeze=False).flat)


def _empty_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(f"octavo bench plot needs matplotlib; {install_extra('plots')}") from error
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, axes: Any, path: Path, title: str) -> None:
    axes.set_title(title, fontsize=10)
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "octavo", "svg.fonttype": "none"}):  # no random ids, text as text
        figure.savefig(path, format="svg", metadata={"Date": None})


@contextlib.contextmanager
def _two_panels(path: Path, title: str, curves: Sequence[Curve]) -> Iterator[tuple[Any, Any, dict[str, str]]]:
    """Two axes over steps side by side, and a colour for each variant of the curves; written at the end."""
    figure = _empty_figure(11.0, 4.2)
    left, right = figure.subplots(1, 2)
    variants = list(dict.fromkeys(curve["variant"] for curve in curves))
    yield left, right, dict(zip(variants, (_COLORS * 3)[: len(variants)], strict=True))
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(color="#e3e6ea")
    left.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(figure, path)


def _draw_seeds(axes: Any, seeds: Sequence[Sequence[Sequence[float]]], variant: str, color: str) -> None:
    """One variant: each seed's (step, value) points, and their mean at the steps that all seeds have."""
    values_at: dict[float, list[float]] = {}
    for points in seeds:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.5, alpha=0.4)
        for step, value in points:
            values_at.setdefault(step, []).append(value)
    means = {step: statistics.fmean(values) for step, values in values_at.items() if len(values) == len(seeds)}
    axes.plot(list(means), list(means.values()), color=color, label=variant, linewidth=1.5)


def _limit_gaps(axes: Any, curves: Sequence[Sequence[float]]) -> None:
    """Leave the first eighth, where a loss falls steeply and a gap says little, out of the axis's limits."""
    values = [value for curve in curves for value in curve[len(curve) // 8 :]]
    if values:
        low, high = min(*values, -0.1), max(*values, 0.1)
        margin = 0.1 * (high - low)
        axes.set_ylim(low - margin, high + margin)
