"""The picture of a scaling law: measured and fitted loss against tokens and against compute, and the residuals."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tril.scripts.ablation.plot_style import COLORS, LOSS, engineering_axis
from tril.scripts.ablation.scaling_law import Law, Points
from tril.scripts.ablation.scaling_predictions import percentile_interval

EXTRAPOLATION = 4  # how far the dotted part of a curve extends beyond the data, as a factor
CURVE_POINTS = 100


def plot_law(path: str | Path, points: Points, law: Law, resamples: Sequence[Law]) -> None:
    """PNG: the loss of each size against tokens and against compute with its best split; below, measured - fitted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 7.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(2, 1))
    left, below = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, :])
    right = figure.add_subplot(grid[0, 1], sharey=left)
    for i, size in enumerate(np.unique(points.parameters)):
        measured, color = points.take(points.parameters == size), COLORS[i % len(COLORS)]
        inside = np.geomspace(measured.tokens.min(), measured.tokens.max(), CURVE_POINTS)
        beyond = np.geomspace(measured.tokens.max(), measured.tokens.max() * EXTRAPOLATION, CURVE_POINTS)
        for axes, cost, label in ((left, 1, f"{size / 1e6:.3g} M"), (right, 6 * size, None)):
            axes.plot(measured.tokens * cost, measured.loss, "o", color=color, ms=5, label=label)
            axes.plot(inside * cost, law.loss(size, inside), color=color, lw=1.2)
            axes.plot(beyond * cost, law.loss(size, beyond), color=color, lw=1.0, ls=":")
        plot_residuals(below, measured, law, color)
    plot_frontier(right, points, law, resamples)
    left.set(xlabel="training tokens D", ylabel=LOSS, title="Loss against text, by size N")
    right.set(xlabel="training FLOPs, 6 N D", title="Loss against compute")
    below.axhline(0, color="black", lw=0.8)
    title = "What the fit leaves (dots: seeds, lines: their means); if it is chance, it has no pattern"
    below.set(xlabel="training tokens D", ylabel="loss - fit, nats per token", title=title)
    for axes in (left, right, below):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    for axes in (left, below):
        engineering_axis(axes, wide=True)
    left.legend(title="N; lines: the fit", fontsize=9)
    right.legend(fontsize=9)
    figure.savefig(path, dpi=150)


def plot_residuals(axes, measured: Points, law: Law, color: str) -> None:
    """Measured - fitted loss of the points of one size, of every seed and of the mean."""
    fitted = law.loss(measured.parameters, measured.tokens)
    axes.plot(measured.tokens, measured.by_seed - fitted[:, None], "o", color=color, ms=3.5, alpha=0.6)
    axes.plot(measured.tokens, measured.loss - fitted, "-", color=color, lw=1.2)


def plot_frontier(axes, points: Points, law: Law, resamples: Sequence[Law]) -> None:
    """The lowest loss at each compute, with the interval over resamples, if there are any."""
    flops = 6 * points.parameters * points.tokens
    compute = np.geomspace(flops.min(), flops.max() * EXTRAPOLATION, CURVE_POINTS)
    # (1 + resamples, CURVE_POINTS)
    best = np.array([[each.loss(*each.optimum(c)) for c in compute] for each in [law, *resamples]])
    if resamples:
        low, high = np.transpose([percentile_interval(column) for column in best[1:].T])
        axes.fill_between(compute, low, high, color="0.5", alpha=0.25, lw=0, label="its 95 % interval")
    axes.plot(compute, best[0], color="black", lw=1.4, ls="--", label="the best split of the compute")
