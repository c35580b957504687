"""The picture of a model's heads: the loss without one and without several, and the scores over the steps of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tril.model.atomic_files import write_picture
from tril.model.comparison import UNCLEAR
from tril.model.heads.ablation import Ablation
from tril.model.heads.records import COPY_LOSSES, UNIFORM
from tril.model.heads.scores import SCORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

DPI = 130
MAX_ANNOTATED = 24  # heads whose names fit along a curve
OVER_TIME = [["previous", "first"], ["self", "induction"], ["entropy", "distance"], ["losses", "legend"]]


def plot_heads(
    path: str | Path, ablation: Ablation, removal: Sequence[Mapping[str, Any]], records: "DataFrame | None" = None
) -> None:
    """PNG: the loss without each head, without more and more heads, and the scores of every head over the steps.

    Args:
        removal: see `ablation.remove_in_turn`.
        records: see `records.read_records`; None: the run has none.
    """
    from matplotlib.figure import Figure  # not pyplot, which may look for a display

    n_layers, n_heads = ablation.single.shape[:2]
    panels: Any = [["alone", "in turn"], *([] if records is None else OVER_TIME)]
    heights = [max(4.0, 0.6 * n_layers + 1.2), *[3.0] * (len(panels) - 1)]
    size = (2 * max(6.0, 0.8 * n_heads + 1.5), sum(heights))  # in inches
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplot_mosaic(panels, height_ratios=heights)
    draw_ablation(axes["alone"], ablation)
    draw_removal(axes["in turn"], removal)
    if records is not None:
        draw_records(axes, records)
    write_picture(path, figure, DPI)


def draw_ablation(axes: "Axes", ablation: Ablation) -> None:
    """Layers x heads with the change of the loss and its interval. Those with a verdict are bold."""
    from matplotlib.colors import CenteredNorm

    rows, (n_layers, n_heads) = ablation.rows(), ablation.single.shape[:2]
    rises = np.array([row["change"] for row in rows]).reshape(n_layers, n_heads)
    largest = np.abs(rises).max() or 1.0
    image = axes.imshow(rises, cmap="RdBu_r", norm=CenteredNorm(0, largest), aspect="auto")
    for ((layer, head), rise), row in zip(np.ndenumerate(rises), rows, strict=True):
        style: Any = {"color": "white" if abs(rise) > 0.6 * largest else "black"}
        style["weight"] = "normal" if row["verdict"] == UNCLEAR else "bold"
        text = f"{rise:+.3f}\n± {row['high'] - rise:.3f}"
        axes.text(head, layer, text, ha="center", va="center", fontsize=8, **style)
    title = f"Each head removed alone, ± its interval over {ablation.clusters.unit}\nbold: distinguishable from 0"
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="head", ylabel="layer", xticks=range(n_heads), yticks=range(n_layers))
    axes.figure.colorbar(image, ax=axes, label="rise of the loss, nats per token", pad=0.02)


def draw_removal(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """The loss with more and more heads removed, the least important first, with the paired interval as a band."""
    numbers, whole = [row["n_removed"] for row in rows], rows[0]["loss"]
    axes.plot(numbers, [row["loss"] for row in rows], marker="o", ms=3)
    low, high = ([whole + row[end] for row in rows] for end in ("low", "high"))
    axes.fill_between(numbers, low, high, alpha=0.2, lw=0)
    for row in rows[1:] if len(rows) <= MAX_ANNOTATED else []:
        at = (row["n_removed"], row["loss"])
        axes.annotate(row["removed_last"], at, (0, 6), textcoords="offset points", ha="center", fontsize=7)
    axes.axhline(whole, color="grey", ls="--", lw=1)
    axes.margins(y=0.15)
    axes.set_title("Heads removed one after another, the least important first\ndashed: the whole model", fontsize=10)
    axes.set(xlabel="heads removed", ylabel="loss, nats per token")
    axes.locator_params(axis="x", integer=True)


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
