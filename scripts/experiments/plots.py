"""The pictures of a sweep's report: differences and curves."""

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tril.model.atomic_files import write_picture
from tril.model.comparison import BETTER, EQUAL, UNCLEAR, WORSE, Comparison
from tril.model.runs import METRICS
from tril.model.runs import Run as RunFolder
from tril.scripts.experiments.losses import Losses
from tril.scripts.experiments.sweep import Run, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# distinguishable for color-blind readers
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c6d31")
DASHES = ("-", "--", "-.")  # of each cycle through the colors
VERDICTS: dict[str, dict[str, Any]] = {  # -> color and marker; a triangle points to the side of the variant
    BETTER: {"color": "#0072b2", "marker": "<"},
    WORSE: {"color": "#d55e00", "marker": ">"},
    EQUAL: {"color": "#009e73", "marker": "D"},
    UNCLEAR: {"color": "0.4", "marker": "o"},
}
WIDTH, DPI = 4.6, 200  # inches: legible on a phone, where it is 3.5 inches wide, whose pixels are small
ROW, LINE = 0.17, 34  # inches of a line of text; characters of a line of a label
MAX_LOSS_RATIO = 2.5  # largest loss shown / median loss: a diverged run does not squeeze the others


class Picture(NamedTuple):
    """A picture of the report."""

    title: str
    caption: str
    figure: "Figure"


def draw(sweep: Sweep, losses: Losses, folder: Path, comparisons: Mapping[str, Comparison]) -> dict[str, Picture]:
    """Writes every picture for which the sweep has data: file name -> picture.

    Args:
        losses: of the sweep.
        comparisons: label -> comparison with the baseline.
    """
    drawn = {"differences.png": plot_differences(sweep, losses, comparisons), "curves.png": plot_curves(sweep)}
    pictures = {name: picture for name, picture in drawn.items() if picture is not None}
    for name, picture in pictures.items():
        write_picture(folder / name, picture.figure, DPI)
    return pictures


def plot_differences(sweep: Sweep, losses: Losses, comparisons: Mapping[str, Comparison]) -> Picture | None:
    """The difference of each variant from the baseline with its interval, and the differences of single runs."""
    shown = {label: each for label, each in comparisons.items() if math.isfinite(each.difference.mean)}
    if not shown:
        return None
    labels = [variant.label for variant in (sweep.baseline, *sweep.others)]
    reference = losses.by_seed[0] if losses.paired else np.nanmean(losses.by_seed[0])
    names = [wrapped(label) for label in shown]
    figure = new_figure(1.2 + ROW * sum(name.count("\n") + 2 for name in names))
    axes = figure.subplots()
    for row, (label, each) in enumerate(shown.items()):
        bar = None if each.difference.low is None else each.difference.half_width
        style = VERDICTS.get(each.verdict, VERDICTS[UNCLEAR]) | {"ms": 7, "capsize": 4, "lw": 2, "label": each.verdict}
        axes.errorbar(each.difference.mean, -row, xerr=bar, ls="none", **style)
        seeds = losses.by_seed[labels.index(label)] - reference
        axes.plot(seeds, np.where(np.isfinite(seeds), -row - 0.2, np.nan), "|", ms=5, color="0.4", label="one run")
    axes.axvline(0, color="black", lw=1, zorder=0)
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set(ylim=(0.5 - len(names), 0.5))
    axes.locator_params(axis="x", nbins=5)
    base = textwrap.shorten(literal(sweep.baseline.label), 40, placeholder=" ...")
    axes.set_xlabel(f"difference from {base}\nin {losses.unit}\n← better (lower loss)    worse →", loc="right")
    add_legend(figure, dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    caption = (
        "A bar is the interval that decides the verdict: one that excludes zero shows a difference. A short line below "
        f"it is one run minus the {'run of the same seed' if losses.paired else 'mean'} of the baseline."
    )
    return Picture(f"Differences from {sweep.baseline.label}", caption, figure)


def plot_curves(sweep: Sweep) -> Picture | None:
    """The validation losses against training tokens: whole runs above, below their later halves."""
    curves = {run.folder: curve_of(run) for run in sweep.runs}
    if all(len(curve) < 2 for curve in curves.values()):
        return None
    from matplotlib.ticker import EngFormatter, MaxNLocator

    every = np.concatenate([*curves.values()])
    last, lines, figure = every[:, 0].max(), {}, new_figure(6.0)
    for axes, first, title in zip(figure.subplots(2, 1), (0, last / 2), ("whole runs", "later halves"), strict=True):
        for i, variant in enumerate(sweep.variants):
            color, dashes = COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]
            for run in variant.runs:
                style = {"ls": dashes if run.state == "finished" else ":", "color": color, "lw": 1.1}
                lines[variant.label] = axes.plot(*curves[run.folder].T, **style)[0]
        values = every[every[:, 0] >= first, 1]
        low, high = values.min(), min(values.max(), MAX_LOSS_RATIO * np.median(values))
        margin = 0.04 * (high - low) or 0.01 * abs(high)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(ylim=(low - margin, high + margin), xlim=(first, 1.02 * last), ylabel="loss, nats per token")
        axes.xaxis.set(major_formatter=EngFormatter(sep=" "), major_locator=MaxNLocator(5))
    axes.set_xlabel("training tokens")
    add_legend(figure, lines)
    caption = "A line is the validation loss of one run; a dotted one is not finished."
    return Picture("Loss against training tokens", caption, figure)


def curve_of(run: Run) -> np.ndarray:
    """Training tokens and the finite validation losses so far, (n, 2)."""
    names = ("train/tokens", "val/loss")
    rows = RunFolder(run.folder).metrics if (run.folder / METRICS).is_file() else []
    curve = np.array([[*map(row.get, names)] for row in rows if row.keys() >= {*names}], float).reshape(-1, 2)
    return curve[np.isfinite(curve[:, 1])]


def new_figure(height: float) -> "Figure":
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    return Figure(figsize=(WIDTH, height), layout="constrained")


def add_legend(figure: "Figure", lines: Mapping[str, Any]) -> None:
    """A sample of each line with its label, in additional rows below the axes."""
    names = [wrapped(label, 56) for label in lines]
    figure.set_figheight(figure.get_figheight() + ROW * sum(name.count("\n") + 1 for name in names))
    if names:
        figure.legend([*lines.values()], names, loc="outside lower center", fontsize=8, frameon=False)


def wrapped(label: str, width: int = LINE) -> str:
    return "\n".join(textwrap.wrap(literal(label), width))


def literal(text: str) -> str:
    """Text that matplotlib shows as it is, without formulas between dollars."""
    return text.replace("$", r"\$")
