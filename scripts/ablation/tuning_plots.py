"""Plots the loss of each variant on the tuning text against the multiplier of its learning rates."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tril.scripts.ablation import plot_style
from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.tuning_results import Tuning


def plot_tuning(sweep: Sweep, tunings: Mapping[str, Tuning]) -> Iterator[tuple[Any, plot_style.Picture]]:
    """A line for each variant whose multiplier is chosen; no figure without one."""
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    styles = {label: style for label, style in plot_style.line_styles(sweep).items() if label in tunings}
    if not styles:
        return
    axes = plot_style.new_figure(4.0).subplots()
    for label, style in styles.items():
        tuning = tunings[label]
        points = [(multiplier, loss) for multiplier, loss in tuning.losses.items() if math.isfinite(loss)]
        axes.plot(*zip(*points, strict=True), lw=1.1, ms=4, **style)
        chosen = (tuning.lr_scale, tuning.losses[tuning.lr_scale])
        mark = "s" if tuning.at_edge else "o"
        axes.plot(*chosen, marker=mark, ls="none", ms=12, mfc="none", mec=style["color"], mew=1.5)
    multipliers = sorted({multiplier for tuning in tunings.values() for multiplier in tuning.losses})
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(multipliers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set(xlabel="learning-rate multiplier", ylabel="loss on the tuning text, nats per token")
    plot_style.add_legend(axes.figure, styles)
    caption = "Each point is the mean over the tuning seeds for one multiplier. The chosen one has a ring"
    if any(tuning.at_edge for tuning in tunings.values()):
        caption += ", or a square if it is an end of the range, so that a better one may be outside of it"
    yield axes.figure, plot_style.Picture("tuning.png", "Loss for each multiplier", f"{caption}.", "tuning")
