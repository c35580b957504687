"""The picture of a scaling law: the cells and the fitted loss, against tokens and against compute."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tril.scripts.ablation.figures import COLOURS, LOSS, engineering
from tril.scripts.ablation.scaling_law import Cells, Law, interval

BEYOND = 4  # how far the dashed part of a curve goes past the data, as a factor
POINTS = 100  # of a curve
DPI = 150


def plot(path: str | Path, cells: Cells, law: Law, resamples: Sequence[Law]) -> None:
    """PNG: the loss of each size against tokens (left) and against compute with the best split of it (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, size in enumerate(np.unique(cells.parameters)):
        own, colour = cells.take(cells.parameters == size), COLOURS[i % len(COLOURS)]
        inside = np.geomspace(own.tokens.min(), own.tokens.max(), POINTS)
        dashed = np.geomspace(own.tokens.max(), own.tokens.max() * BEYOND, POINTS)
        for axes, cost in ((left, 1), (right, 6 * size)):
            axes.plot(
                own.tokens * cost,
                own.loss,
                "o",
                color=colour,
                ms=5,
                label=f"{size / 1e6:.3g} M" if axes is left else None,
            )
            axes.plot(inside * cost, law.loss(size, inside), color=colour, lw=1.2)
            axes.plot(dashed * cost, law.loss(size, dashed), color=colour, lw=1.0, ls=":")
    frontier(right, cells, law, resamples)
    left.set(xlabel="training tokens D", ylabel=LOSS, title="Loss against text, by size N")
    right.set(xlabel="training FLOPs, 6 N D", title="Loss against compute")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    engineering(left, wide=True)
    left.legend(title="N; lines: the law", fontsize=9)
    right.legend(fontsize=9)
    figure.savefig(path, dpi=DPI)


def frontier(axes, cells: Cells, law: Law, resamples: Sequence[Law]) -> None:
    """The least loss at each compute, with the interval over resamples."""
    flops = 6 * cells.parameters * cells.tokens
    compute = np.geomspace(flops.min(), flops.max() * BEYOND, POINTS)
    best = np.array(
        [[each.loss(*each.optimum(c)) for c in compute] for each in [law, *resamples]]
    )  # (1 + resamples, POINTS)
    low, high = np.transpose([interval(column) for column in best[1:].T])
    axes.fill_between(compute, low, high, color="0.5", alpha=0.25, lw=0, label="its 95 % interval")
    axes.plot(compute, best[0], color="black", lw=1.4, ls="--", label="the best split of the compute")
