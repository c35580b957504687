"""Draws all pictures of a sweep's report as PNGs."""

import math
from collections.abc import Mapping
from pathlib import Path

from tril.scripts.ablation.curve_plots import plot_curves
from tril.scripts.ablation.difference_plots import plot_differences
from tril.scripts.ablation.final_loss_plots import plot_by_size, plot_final_losses
from tril.scripts.ablation.plot_style import Picture, estimate
from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.statistics import Comparison
from tril.scripts.ablation.tuning_plots import plot_tuning
from tril.scripts.ablation.tuning_results import read_tuning

DPI = 200  # sharp on a phone, whose pixels are small


def draw(sweep: Sweep, which: str, folder: Path, comparisons: Mapping[str, Comparison]) -> list[Picture]:
    """Writes every picture for which the sweep has data.

    Args:
        which: "final" or "best" loss.
        comparisons: label -> comparison with the baseline of the `which` losses.
    """
    estimates = {variant.label: estimate(variant, f"{which}_val_loss") for variant in sweep.variants}
    losses = {label: loss for label, loss in estimates.items() if loss and math.isfinite(loss.mean)}
    drawn = [*plot_differences(sweep, which, comparisons), *plot_curves(sweep)]
    if losses:
        drawn += [*plot_final_losses(sweep, which, losses), *plot_by_size(sweep, which, losses)]
    drawn += plot_tuning(sweep, read_tuning(sweep))
    for figure, picture in drawn:
        figure.savefig(folder / picture.file, dpi=DPI)
    return [picture for _, picture in drawn]
