"""Plots of the records, as SVG that is the same for the same record; matplotlib is imported when one is drawn."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figures, split_case
from octavo.errors import BackendError, install_extra

_COLORS = ("#30507a", "#c2410c", "#047857", "#7c3aed", "#be185d", "#6b7280")
_BASE_COLOR = "#9aa4b2"
_LATENCIES = {"time to first token": "s", "inter-token latency": "ms"}
_PERCENTILES = (50, 90, 99)


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
        axes.plot(xs, ys, color=_COLORS[index % len(_COLORS)], label=name, **style)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#e3e6ea")
    axes.legend(fontsize=8)
    _save(figure, axes, path, title)


def plot_step(figures: Figures, path: Path) -> None:
    """Milliseconds a step."""
    bars(path, _values(figures, "step time"), title="a training step", label="ms a step")


def plot_layer(figures: Figures, path: Path) -> None:
    """Milliseconds a layer, forward and backward."""
    bars(path, _values(figures, "time"), title="one layer, forward and backward", label="ms")


def plot_gemm(figures: Figures, path: Path) -> None:
    """TFLOP/s of every shape and product."""
    bars(path, _values(figures, "rate"), title="products", label="TFLOP/s")


def plot_quant(figures: Figures, path: Path) -> None:
    """Share of copy bandwidth of every kernel."""
    values = _values(figures, "share of copy bandwidth")
    bars(path, values, title="bytes of the floor over time, against a copy", label="share of a copy's bandwidth")


def plot_capacity(figures: Figures, path: Path) -> None:
    """Tokens a step that fit on the card."""
    bars(path, _values(figures, "most tokens a step"), title="what one card holds", label="tokens a step")


def plot_qdq(figures: Figures, path: Path) -> None:
    """Microseconds of each block and arm."""
    bars(path, _values(figures, "time"), title="blocks with Q/DQ pairs", label="µs")


def plot_sizes(figures: Figures, path: Path) -> None:
    """Speedup over compiled bf16 by model size."""
    series: dict[str, list[tuple[str, float]]] = {}
    for case in figures.cases:
        size, arm = split_case(case)
        value = figures.value(case, "speedup")
        if value is not None and "octavo" in arm:
            series.setdefault(arm, []).append((size, value))
    x_label, y_label = "model whose layers these are", "speedup over compiled bf16"
    lines(path, series, title="a training step by model size", x_label=x_label, y_label=y_label)


def plot_linear(figures: Figures, path: Path) -> None:
    """Speedup of each shape over bf16, replayed from a graph, by the work in it."""
    series: dict[str, list[tuple[float, float]]] = {}
    for case in figures.cases:
        shape, arm = split_case(case)
        value = figures.value(case, "speedup, graph")
        if value is not None and arm.startswith("octavo") and "cached" not in arm:
            tokens, cols, rows = (int(size) for size in shape.split("x"))
            series.setdefault(arm, []).append((6e-9 * tokens * cols * rows, value))
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
            workload, _, arm = case.partition(": octavo ")
            throughput[f"{workload}: vLLM beside {arm}"] = peer_value
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
    "gemm": plot_gemm,
    "quant": plot_quant,
    "linear": plot_linear,
    "layer": plot_layer,
    "step": plot_step,
    "sizes": plot_sizes,
    "capacity": plot_capacity,
    "qdq": plot_qdq,
    "serve": plot_serve,
    "rl": plot_rl,
}


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
    from matplotlib import rc_context

    axes.set_title(title, fontsize=10)
    with rc_context({"svg.hashsalt": "octavo", "svg.fonttype": "none"}):  # no random ids, text as text
        figure.savefig(path, format="svg", metadata={"Date": None})
