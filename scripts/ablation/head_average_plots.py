"""Plots of head ablation averaged over seeds: by layer, by rank, and with more and more heads removed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tril.scripts.ablation import plot_style
from tril.scripts.ablation.results import Sweep

if TYPE_CHECKING:
    from tril.model.heads.seed_averages import Averages

PICTURES = {  # file -> quantity, title, label of the x axis
    "layers.png": ("layer", "Sum over the heads of a layer, each removed alone", "layer"),
    "ranks.png": ("rank", "Each head removed alone, from the largest rise to the smallest", "rank of the head"),
    "removal.png": ("removed", "Heads removed one after another, the least important first", "share of heads removed"),
}
DPI = 130
MAX_SHIFT = 0.15  # layers


def draw_averages(sweep: Sweep, averages: Mapping[str, "Averages"], folder: Path) -> list[str]:
    """Writes a PNG for each of PICTURES, with a panel for each method; returns their names.

    Args:
        averages: label of each variant -> its averages over seeds.
    """
    from tril.model.heads.ablation import METHODS
    from tril.model.heads.head_plots import TITLES

    styles = {label: style for label, style in plot_style.line_styles(sweep).items() if label in averages}
    for file, (quantity, title, x_label) in PICTURES.items():
        figure = plot_style.new_figure(3.6)
        panels = figure.subplots(1, len(METHODS), sharey=True)
        for axes, method in zip(panels, METHODS, strict=True):
            for number, (label, style) in enumerate(styles.items()):
                shift = MAX_SHIFT * (2 * number / max(1, len(styles) - 1) - 1) * (quantity == "layer")
                plot_line(axes, averages[label], method, quantity, style, shift)
            axes.axhline(0, color="0.6", lw=0.8, zorder=0)
            axes.set_title(TITLES[method], fontsize=9)
            axes.set_xlabel(x_label)
            if quantity != "removed":
                axes.locator_params(axis="x", integer=True)
        panels[0].set_ylabel("rise of the loss, nats per token")
        figure.suptitle(f"{title}\nmean and 95 % interval over seeds", fontsize=10)
        plot_style.add_legend(figure, styles)
        figure.savefig(folder / file, dpi=DPI)
    return list(PICTURES)


def plot_line(axes, averages: "Averages", method: str, quantity: str, style: dict, shift: float) -> None:
    """The means of one quantity by their index, with their intervals; one seed has none.

    Args:
        shift: of the positions, so that the bars of the few layers do not overlap; other intervals are a band.
    """
    points = {index: value for (by, name, index), value in averages.items() if (by, name) == (method, quantity)}
    scale = max(points) if quantity == "removed" else 1
    x, mean = [index / scale + shift for index in points], [value.mean for value in points.values()]
    axes.plot(x, mean, ms=3, lw=1.3, **style)
    if any(value.low is None for value in points.values()):
        return
    if quantity == "layer":
        half_widths = [value.half_width for value in points.values()]
        axes.errorbar(x, mean, half_widths, ls="none", color=style["color"], capsize=2, lw=1)
    else:
        ends = zip(*[(value.low, value.high) for value in points.values()], strict=True)
        axes.fill_between(x, *ends, color=style["color"], alpha=0.15, lw=0)
