"""Plots of the pretraining curves, as SVG that is the same for the same curves."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.training.convergence_results import BASE, THIN
from bench.training.pretraining_arms import parse_arm

COLORS = ("#30507a", "#c2410c", "#047857", "#7c3aed", "#be185d", "#6b7280", "#a16207", "#0891b2")
SMOOTH = 5  # points of THIN steps in a running mean
Curve = dict[str, Any]


def plot_arms(path: Path, curves: Sequence[Curve], title: str) -> None:
    """Training loss on the left; on the right each arm's difference to bf16 on the same batches, in percent."""
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    arms = list(dict.fromkeys(curve["arm"] for curve in curves))
    for arm, color in zip(arms, (COLORS * 3)[: len(arms)], strict=True):
        losses = mean_losses(curves, arm)
        label = parse_arm(arm).label
        left.plot(steps_of(losses), losses, color=color, label=label, linewidth=1.1)
        gaps = smoothed(mean_gaps(curves, arm))
        if arm != BASE and gaps:
            right.plot(steps_of(gaps), gaps, color=color, label=label, linewidth=1.3)
    left.set_ylabel("training loss, nats a token")
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    right.axhline(0.0, color="black", linewidth=0.8, linestyle="--")
    right.set_ylabel(f"difference to {BASE}, %")
    limit_gaps(right, [smoothed(mean_gaps(curves, arm)) for arm in arms if arm != BASE])
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(color="#e3e6ea")
    right.legend(fontsize=8)
    left.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "octavo", "svg.fonttype": "none"}):  # no random ids, text as text
        figure.savefig(path, format="svg", metadata={"Date": None})


def mean_losses(curves: Sequence[Curve], arm: str) -> list[float]:
    """An arm's training loss, mean over its seeds."""
    mine = [curve["loss"] for curve in curves if curve["arm"] == arm]
    return [statistics.fmean(values) for values in zip(*mine, strict=True)]


def mean_gaps(curves: Sequence[Curve], arm: str) -> list[float]:
    """An arm's difference to bf16 in percent, paired by seed, mean over the seeds; empty where there is no pair."""
    bases = {curve["seed"]: curve["loss"] for curve in curves if curve["arm"] == BASE}
    gaps = [
        [100.0 * (mine / base - 1.0) for mine, base in zip(curve["loss"], bases[curve["seed"]], strict=True)]
        for curve in curves
        if curve["arm"] == arm and curve["seed"] in bases
    ]
    return [statistics.fmean(values) for values in zip(*gaps, strict=True)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over the last SMOOTH points, fewer at the start."""
    return [statistics.fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def steps_of(points: Sequence[float]) -> list[int]:
    """Where the points of a thinned curve end."""
    return [THIN * (i + 1) for i in range(len(points))]


def limit_gaps(axes: Any, curves: Sequence[Sequence[float]]) -> None:
    """Leave the first eighth, where a loss falls steeply and a gap says little, out of the axis's limits."""
    values = [value for curve in curves for value in curve[len(curve) // 8 :]]
    if values:
        low, high = min(*values, -0.1), max(*values, 0.1)
        margin = 0.1 * (high - low)
        axes.set_ylim(low - margin, high + margin)
