"""Draws all pictures of a sweep's report as PNGs."""

import math
from pathlib import Path

from tril.scripts.ablation.curve_plots import plot_curves
from tril.scripts.ablation.final_loss_plots import plot_by_size, plot_final_losses
from tril.scripts.ablation.plot_style import Picture, estimate
from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.tuning_plots import plot_tuning
from tril.scripts.ablation.tuning_results import read_tuning


def draw(sweep: Sweep, which: str, folder: Path) -> list[Picture]:
    """Writes every picture for which the sweep has data; `which` loss is final or best."""
    estimates = {variant.label: estimate(variant, f"{which}_val_loss") for variant in sweep.variants}
    losses = {label: loss for label, loss in estimates.items() if loss and math.isfinite(loss.mean)}
    drawn = list(plot_curves(sweep))
    if losses:
        drawn += [*plot_final_losses(sweep, which, losses), *plot_by_size(sweep, which, losses)]
    drawn += plot_tuning(sweep, read_tuning(sweep))
    for figure, picture in drawn:
        figure.savefig(folder / picture.file, dpi=150)
    return [picture for _, picture in drawn]
