"""Plots of the learning matrix, as SVG that is the same for the same curves."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.training.convergence_plots import COLORS

FLOOR = 1e-6  # nats; below it the axis of the mismatch is linear, so that 0 has a place
Curve = dict[str, Any]


def plot_group(path: Path, curves: Sequence[Curve], title: str) -> None:
    """Held-out reward, and mean difference of logprobs, over steps: means over seeds, each seed thin behind."""
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    arms = list(dict.fromkeys(curve["arm"] for curve in curves))
    for arm, color in zip(arms, (COLORS * 3)[: len(arms)], strict=True):
        mine = [curve for curve in curves if curve["arm"] == arm]
        _draw(left, [curve["held_out"] for curve in mine], arm, color)
        _draw(right, [list(zip(curve["step"], curve["diff"], strict=True)) for curve in mine], arm, color)
    left.set_ylabel("held-out reward, bf16 and greedy")
    right.set_ylabel("mean |trainer's - sampler's logprob|, nats")
    right.set_yscale("symlog", linthresh=FLOOR)
    right.set_ylim(bottom=0.0)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(color="#e3e6ea")
    left.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "octavo", "svg.fonttype": "none"}):  # no random ids, text as text
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw(axes: Any, seeds: Sequence[Sequence[Sequence[float]]], arm: str, color: str) -> None:
    """One arm: each seed's (step, value) points, and their mean at the steps that all seeds have."""
    values_at: dict[float, list[float]] = {}
    for points in seeds:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.5, alpha=0.4)
        for step, value in points:
            values_at.setdefault(step, []).append(value)
    means = {step: statistics.fmean(values) for step, values in values_at.items() if len(values) == len(seeds)}
    axes.plot(list(means), list(means.values()), color=color, label=arm, linewidth=1.5)
