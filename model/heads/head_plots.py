"""Pictures of heads: of a model, the loss without each and the scores; of a sweep, the losses over seeds."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tril.model.comparison import UNCLEAR, Comparison
from tril.model.heads.ablation import Ablation
from tril.model.heads.records import COPY_LOSSES, UNIFORM
from tril.model.heads.scores import SCORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

COLOR = "tab:blue"
DPI = 130
OVER_TIME = [["previous", "first"], ["self", "induction"], ["entropy", "distance"], ["losses", "legend"]]


@contextlib.contextmanager
def saved_figure(path: str | Path, width: float, height: float) -> Iterator["Figure"]:
    """A figure of this size in inches; it is written to a PNG file when the block ends."""
    from matplotlib.figure import Figure  # not pyplot, which may look for a display

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    Path(path).unlink(missing_ok=True)  # perhaps a link to another place
    figure.savefig(path, dpi=DPI)


def plot_heads(path: str | Path, ablation: Ablation, records: "DataFrame | None" = None) -> None:
    """PNG: the loss without each head, and the scores of every head over the steps.

    Args:
        records: see `records.read_records`; None: the run has none.
    """
    n_layers, n_heads = ablation.single.shape[:2]
    panels: Any = [["alone", "alone"], *([] if records is None else OVER_TIME)]
    heights = [max(4.0, 0.6 * n_layers + 1.2), *[3.0] * (len(panels) - 1)]
    with saved_figure(path, max(6.0 if records is None else 12.0, 0.8 * n_heads + 1.5), sum(heights)) as figure:
        axes = figure.subplot_mosaic(panels, height_ratios=heights)
        draw_ablation(axes["alone"], ablation)
        if records is not None:
            draw_records(axes, records)


def draw_ablation(axes: "Axes", ablation: Ablation) -> None:
    """Layers x heads with the change of the loss and its interval. Those without a verdict are hatched."""
    from matplotlib.colors import CenteredNorm
    from matplotlib.patches import Rectangle

    rows, (n_layers, n_heads) = ablation.rows(), ablation.single.shape[:2]
    rises = np.array([row["change"] for row in rows]).reshape(n_layers, n_heads)
    largest = np.abs(rises).max() or 1.0
    image = axes.imshow(rises, cmap="RdBu_r", norm=CenteredNorm(0, largest), aspect="auto")
    for ((layer, head), rise), row in zip(np.ndenumerate(rises), rows, strict=True):
        unclear = row["verdict"] == UNCLEAR
        color = "white" if abs(rise) > 0.6 * largest and not unclear else "black"
        box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1} if unclear else None
        text = f"{rise:+.3f}\n± {row['high'] - rise:.3f}"
        axes.text(head, layer, text, ha="center", va="center", fontsize=8, color=color, bbox=box)
        if unclear:
            style = {"fill": False, "hatch": "///", "edgecolor": "0.75", "linewidth": 0, "zorder": 1.5}
            axes.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, **style))
    hatched = f"\nhatched: {UNCLEAR}" if any(row["verdict"] == UNCLEAR for row in rows) else ""
    axes.set_title(f"Each head removed alone, ± its interval over {ablation.clusters.unit}{hatched}", fontsize=10)
    axes.set(xlabel="head", ylabel="layer", xticks=range(n_heads), yticks=range(n_layers))
    axes.figure.colorbar(image, ax=axes, label="rise of the loss, nats per token", pad=0.02)


def draw_records(panels: "Mapping[str, Axes]", records: "DataFrame") -> None:
    """The scores of every head over the steps of its run, and the losses of the copies of repeated sequences."""
    from matplotlib import colormaps
    from matplotlib.ticker import ScalarFormatter

    steps, heads = records.index, [head for head in records["entropy"] if head != UNIFORM]
    layers = [int(name[1:].partition("H")[0]) for name in heads]
    colors = colormaps["viridis"](np.linspace(0, 0.9, max(layers) + 1))
    lines = {}  # label -> line
    for name in (name for name in SCORES if name in panels):
        axes, curves = panels[name], records.xs(name, axis="columns")  # (steps, heads)
        last = curves.iloc[-1]
        [lines["uniform weights"]] = axes.plot(steps, curves[UNIFORM], color="grey", ls="--", lw=1)
        for layer, head in zip(layers, heads, strict=True):
            [lines[f"layer {layer}"]] = axes.plot(steps, curves[head], color=colors[layer], lw=1.2)
            if last[head] == last[heads].max():
                style = {"xytext": (3, 0), "fontsize": 8, "va": "center"}  # beside the curve
                axes.annotate(head, (steps[-1], last[head]), textcoords="offset points", **style)
        axes.set_title(f"{name}: {SCORES[name]}", fontsize=8, wrap=True)
    for name, label, color in zip(COPY_LOSSES, ("first copy", "second copy"), ("tab:brown", "tab:orange"), strict=True):
        [lines[label]] = panels["losses"].plot(steps, records[name, UNIFORM], color=color)
    panels["losses"].set_title("loss of random sequences that are repeated, nats per token", fontsize=8)
    for axes in (panels[name] for name in (*SCORES, "losses") if name in panels):
        axes.set_xscale("symlog", linthresh=1)  # linear up to step 1, since the first step is 0
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.margins(x=0.1, y=0.1)
        axes.grid(alpha=0.3)
        axes.set_xlabel("step", fontsize=8)
    panels["legend"].set_axis_off()
    columns = 1 + len(lines) // 8
    note = "Over the steps of the run, on less text and\nshorter sequences than the printed scores"
    panels["legend"].legend(lines.values(), lines.keys(), loc="center", ncols=columns, title=note, fontsize=8)


def plot_ranks(path: str | Path, averages: Mapping[str, Mapping[str, Comparison]]) -> None:
    """PNG: the rises of single heads from the largest to the smallest, a line with its intervals for each variant.

    Args:
        averages: label of a variant -> see `ablation.average`.
    """
    with saved_figure(path, 8.0, 4.8) as figure:
        axes = figure.subplots()
        for label, of_variant in averages.items():
            ranks = [each.difference for name, each in of_variant.items() if name.startswith("rank")]
            bars = [0.0 if interval.low is None else interval.half_width for interval in ranks]
            means, numbers = [interval.mean for interval in ranks], range(1, len(ranks) + 1)
            axes.errorbar(numbers, means, bars, marker="o", ms=3, lw=1.2, capsize=2, label=label.replace("$", r"\$"))
        axes.axhline(0, color="0.6", lw=0.8, zorder=0)
        axes.set(xlabel="rank of the head", ylabel="rise of the loss, nats per token")
        axes.locator_params(axis="x", integer=True)
        axes.legend()
