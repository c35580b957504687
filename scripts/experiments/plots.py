"""The pictures of a sweep's report: differences and curves."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tril.model.comparison import BETTER, EQUAL, UNCLEAR, WORSE, Comparison
from tril.scripts.experiments.losses import Losses
from tril.scripts.experiments.sweep import Sweep

# distinguishable for color-blind readers
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c6d31")
MARKERS = ("o", "s", "^", "D")  # of each cycle through the colors
VERDICTS: dict[
    str, dict[str, Any]
] = {  # -> color and marker of a difference; a triangle points to the side of the variant
    BETTER: {"color": "#0072b2", "marker": "<"},
    WORSE: {"color": "#d55e00", "marker": ">"},
    EQUAL: {"color": "#009e73", "marker": "D"},
    UNCLEAR: {"color": "0.4", "marker": "o"},
}
NO_VERDICT: dict[str, Any] = {"color": "0.4", "marker": "o", "mfc": "white"}
WIDTH, DPI = 4.6, 200  # inches: legible on a phone, where it is 3.5 inches wide, whose pixels are small
LABEL_WIDTH = 34  # characters of a line of a label
MAX_LOSS_RATIO = 2.5  # largest loss shown / median loss: a diverged run does not squeeze the others


@dataclass(frozen=True)
class Picture:
    """A PNG in the report's folder, its title and caption."""

    file: str
    title: str
    caption: str


def draw(sweep: Sweep, losses: Losses, folder: Path, comparisons: Mapping[str, Comparison]) -> dict[str, Picture]:
    """Writes every picture for which the sweep has data: the section of the report that shows it -> picture.

    Args:
        losses: of the sweep.
        comparisons: label -> comparison with the baseline.
    """
    drawn = {"differences": plot_differences(sweep, losses, comparisons), "curves": plot_curves(sweep)}
    pictures = {}
    for name, (figure, title, caption) in ((name, each) for name, each in drawn.items() if each is not None):
        figure.savefig(folder / f"{name}.png", dpi=DPI)
        pictures[name] = Picture(f"{name}.png", title, caption)
    return pictures


def plot_differences(
    sweep: Sweep, losses: Losses, comparisons: Mapping[str, Comparison]
) -> tuple[Any, str, str] | None:
    """The difference of each variant from the baseline with its interval, and the differences of single seeds."""
    shown = {label: each for label, each in comparisons.items() if math.isfinite(each.difference.mean)}
    if not shown:
        return None
    labels = [variant.label for variant in (sweep.baseline, *sweep.others)]
    by_seed = losses.losses @ losses.sizes / losses.sizes.sum()  # (V, S)
    axes = new_axes(1.0 + row_heights(shown))
    for row, (label, each) in enumerate(shown.items()):
        bar = None if each.difference.low is None else each.difference.half_width
        style: dict[str, Any] = VERDICTS.get(each.verdict, NO_VERDICT)
        axes.errorbar(each.difference.mean, -row, xerr=bar, ls="none", ms=7, capsize=4, lw=2, **style)
        seeds = by_seed[labels.index(label)] - by_seed[0]
        seeds = seeds[np.isfinite(seeds)]
        axes.plot(seeds, np.full(len(seeds), -row - 0.2), "|", ms=5, color="0.4")
    axes.axvline(0, color="black", lw=1, zorder=0)
    name_rows(axes, shown)
    base = textwrap.shorten(escape(sweep.baseline.label), 40, placeholder=" ...")
    label = f"difference from {base}\nin {losses.unit}\n← better (lower loss)    worse →"
    axes.set_xlabel(label, loc="right")  # may be wider than the axes
    styles = {verdict: style for verdict, style in VERDICTS.items() if verdict in {x.verdict for x in shown.values()}}
    add_legend(axes.figure, {verdict: style | {"ls": "none"} for verdict, style in styles.items()})
    caption = (
        "A bar is the interval that decides the verdict: one that excludes zero shows a difference. A short line below "
        "it is the difference of one seed."
    )
    return axes.figure, f"Differences from {sweep.baseline.label}", caption


def plot_curves(sweep: Sweep) -> tuple[Any, str, str] | None:
    """The losses against training tokens: whole runs above, below their later halves.

    A line is the validation loss; where no run was validated twice, it is the training loss, noisy but a curve.
    """
    runs = [(variant.label, run) for variant in sweep.variants for run in variant.runs]
    shown = "val" if any(len(run.curves["val"]) > 1 for _, run in runs) else "train"
    points = [run.curves[name] for _, run in runs for name in {shown, "val"}]
    points = [each[np.isfinite(each[:, 1])] for each in points if np.isfinite(each[:, 1]).any()]
    if not points:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure, styles = Figure(figsize=(WIDTH, 6.0), layout="constrained"), line_styles(sweep)
    last = max(each[-1, 0] for each in points)
    for axes, first, title in zip(figure.subplots(2, 1), (0, last / 2), ("whole runs", "later halves"), strict=True):
        for label, run in runs:
            color, dots = styles[label]["color"], styles[label]["marker"] if shown == "train" else ""
            dashes = styles[label]["ls"] if run.state == "finished" else ":"
            axes.plot(*run.curves[shown].T, ls=dashes, lw=1.1, color=color)
            axes.plot(*run.curves["val"].T, ls="none", marker=dots, ms=4, color=color)
        values = np.concatenate([each[each[:, 0] >= first, 1] for each in points])
        low, high = values.min(), min(values.max(), MAX_LOSS_RATIO * np.median(values))
        margin = 0.04 * (high - low) or 0.01 * abs(high)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(ylim=(low - margin, high + margin), xlim=(first, 1.02 * last), ylabel="loss, nats per token")
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlabel("training tokens")
    add_legend(figure, styles)
    kind = "the validation loss" if shown == "val" else "the training loss, points are validations"
    caption = f"A line is one run: {kind}; the baseline is dashed, an unfinished run dotted, as far as it got."
    return figure, "Loss against training tokens", caption


def line_styles(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """Label -> color, line and marker; the baseline's line is dashed. Many variants get a scale from dark to light."""
    from matplotlib import colormaps

    n, many = len(sweep.variants), len(sweep.variants) > len(COLORS) * len(MARKERS) // 2
    return {
        variant.label: {
            "color": colormaps["viridis"](0.9 * i / (n - 1)) if many else COLORS[i % len(COLORS)],
            "ls": "--" if variant is sweep.baseline and n > 1 else "-",
            "marker": MARKERS[i // len(COLORS) % len(MARKERS)],
        }
        for i, variant in enumerate(sweep.variants)
    }


def new_axes(height: float):
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    return Figure(figsize=(WIDTH, height), layout="constrained").subplots()


def row_heights(labels) -> float:
    """Inches of rows with these labels."""
    return sum(0.17 * (wrapped(label).count("\n") + 2) for label in labels)


def name_rows(axes, labels) -> None:
    axes.set_yticks([-row for row in range(len(labels))], [wrapped(label) for label in labels])
    axes.set(ylim=(0.5 - len(labels), 0.5))
    axes.locator_params(axis="x", nbins=6)


def add_legend(figure, styles: Mapping[str, dict]) -> None:
    """A sample of each line with its label, in additional rows below the axes."""
    from matplotlib.lines import Line2D

    if styles:
        columns = max(1, min(len(styles), 60 // (max(map(len, styles)) + 8)))
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(styles) / columns))
        lines = [Line2D([], [], ms=4, **style) for style in styles.values()]
        layout = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False}
        figure.legend(lines, [escape(label) for label in styles], **layout)


def wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(escape(label), LABEL_WIDTH))


def escape(text: str) -> str:
    """Text that matplotlib shows literally, without formulas between dollars."""
    return text.replace("$", r"\$")
