"""The picture of a scaling law: measured and fitted loss, against tokens and against compute."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tril.scripts.ablation.plot_style import COLORS, LOSS, engineering_axis
from tril.scripts.ablation.scaling_law import Law, Points, percentile_interval

EXTRAPOLATION = 4  # how far the dotted part of a curve extends beyond the data, as a factor
CURVE_POINTS = 100


def plot_law(path: str | Path, points: Points, law: Law, resamples: Sequence[Law]) -> None:
    """PNG: the loss of each size against tokens (left) and against compute with its best split (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, size in enumerate(np.unique(points.parameters)):
        measured, color = points.take(points.parameters == size), COLORS[i % len(COLORS)]
        inside = np.geomspace(measured.tokens.min(), measured.tokens.max(), CURVE_POINTS)
        beyond = np.geomspace(measured.tokens.max(), measured.tokens.max() * EXTRAPOLATION, CURVE_POINTS)
        for axes, cost, label in ((left, 1, f"{size / 1e6:.3g} M"), (right, 6 * size, None)):
            axes.plot(measured.tokens * cost, measured.loss, "o", color=color, ms=5, label=label)
            axes.plot(inside * cost, law.loss(size, inside), color=color, lw=1.2)
            axes.plot(beyond * cost, law.loss(size, beyond), color=color, lw=1.0, ls=":")
    plot_frontier(right, points, law, resamples)
    left.set(xlabel="training tokens D", ylabel=LOSS, title="Loss against text, by size N")
    right.set(xlabel="training FLOPs, 6 N D", title="Loss against compute")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    engineering_axis(left, wide=True)
    left.legend(title="N; lines: the law", fontsize=9)
    right.legend(fontsize=9)
    figure.savefig(path, dpi=150)


def plot_frontier(axes, points: Points, law: Law, resamples: Sequence[Law]) -> None:
    """The lowest loss at each compute, with the interval over resamples."""
    flops = 6 * points.parameters * points.tokens
    compute = np.geomspace(flops.min(), flops.max() * EXTRAPOLATION, CURVE_POINTS)
    # (1 + resamples, CURVE_POINTS)
    best = np.array([[each.loss(*each.optimum(c)) for c in compute] for each in [law, *resamples]])
    low, high = np.transpose([percentile_interval(column) for column in best[1:].T])
    axes.fill_between(compute, low, high, color="0.5", alpha=0.25, lw=0, label="its 95 % interval")
    axes.plot(compute, best[0], color="black", lw=1.4, ls="--", label="the best split of the compute")
