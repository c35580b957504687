"""Forest plot of a sweep: the paired difference of each variant from the baseline, with its corrected interval."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tril.scripts.ablation import plot_style
from tril.scripts.ablation.report_tables import spread
from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.statistics import EQUAL, Comparison

# Verdict -> marker and its color; a triangle points to the side of the variant. Hollow without a verdict.
VERDICTS = {
    "better": {"color": "#0072b2", "marker": "<"},
    "worse": {"color": "#d55e00", "marker": ">"},
    EQUAL: {"color": "#009e73", "marker": "D"},
    "not distinguishable": {"color": "0.4", "marker": "o"},
}
NO_VERDICT = {"color": "0.4", "marker": "o", "mfc": "white"}
LABEL_WIDTH = 36  # characters of a line of a label


@dataclass(frozen=True)
class Row:
    """A variant in the plot: its difference, the ends of the interval (None: no interval), and what is written."""

    label: str
    mean: float
    low: float | None
    high: float | None
    verdict: str
    text: str


def forest_rows(comparisons: Mapping[str, Comparison]) -> dict[str, list[Row]]:
    """The rows of each unit, in the order of the sweep; a difference that is not a finite number has no row."""
    rows: dict[str, list[Row]] = {}
    for label, found in comparisons.items():
        if math.isfinite(found.difference.mean):
            mean, low, high = found.difference.mean, found.difference.low, found.difference.high
            text = spread(found.difference, sign="+", alone=f" ({found.verdict})")
            rows.setdefault(found.unit, []).append(Row(label, mean, low, high, found.verdict, text))
    return rows


def plot_differences(
    sweep: Sweep, which: str, comparisons: Mapping[str, Comparison]
) -> Iterator[tuple[Any, plot_style.Picture]]:
    """One panel for each unit; no figure without a finite difference."""
    panels = forest_rows(comparisons)
    if not panels:
        return
    lines = [sum(row_height(wrapped(row.label)) for row in rows) + 0.4 for rows in panels.values()]
    figure = plot_style.new_figure(sum(0.19 * n + 0.65 for n in lines) + 0.6)
    margins = {found.unit: found.margin for found in comparisons.values() if found.margin is not None}
    for axes, (unit, rows) in zip(
        figure.subplots(len(panels), 1, squeeze=False, height_ratios=lines)[:, 0], panels.items(), strict=True
    ):
        plot_rows(axes, rows, margins.get(unit))
        axes.set_xlabel(f"difference, {unit}\n← better (lower loss)    worse →")
    base = textwrap.wrap(f"from {plot_style.escape(sweep.baseline.label)} (zero line)", 60)
    figure.suptitle("\n".join([f"Differences of the {which} loss", *base]), fontsize=10)
    verdicts = [row.verdict for rows in panels.values() for row in rows]
    styles = {words: style for words, style in VERDICTS.items() if words in verdicts}
    if set(verdicts) - set(VERDICTS):
        styles["no verdict"] = NO_VERDICT
    plot_style.add_legend(figure, {words: style | {"ls": "none"} for words, style in styles.items()})
    title = f"Differences from {sweep.baseline.label}"
    yield figure, plot_style.Picture("differences.png", title, caption_of(comparisons), "comparison")


def caption_of(comparisons: Mapping[str, Comparison]) -> str:
    """Explains what is drawn."""
    lines = ["Each variant is paired with the baseline by seed and by part of the text."]
    if any(found.difference.low is not None for found in comparisons.values()):
        lines.append("A bar is the interval that decides the verdict: one that excludes zero shows a difference.")
        if len(comparisons) > 1:
            lines.append(f"The intervals are corrected for {len(comparisons)} comparisons.")
    if any(found.margin is not None for found in comparisons.values()):
        lines.append("The band is the margin within which variants count as equal.")
    return " ".join(lines)


def plot_rows(axes, rows: Sequence[Row], margin: float | None) -> None:
    """For each row a line of text, its label on the left and the numbers on the right, above a marker with a bar."""
    y = 0.0  # in lines, downwards
    for row in rows:
        label = wrapped(row.label)
        y += row_height(label)
        style = VERDICTS.get(row.verdict, NO_VERDICT)
        bar = None if row.low is None or row.high is None else [[row.mean - row.low], [row.high - row.mean]]
        axes.errorbar(row.mean, y, xerr=bar, ls="none", ms=7, capsize=4, lw=2, **style)
        for x, text, side in ((0.0, "\n".join(label), "left"), (1.0, row.text, "right")):
            box = {"facecolor": "white", "lw": 0, "pad": 0.5}  # the zero line does not cross the text
            axes.text(x, y - 0.5, text, transform=axes.get_yaxis_transform(), ha=side, va="bottom", bbox=box)
    axes.axvline(0, color="black", lw=1, zorder=0)
    if margin is not None:
        axes.axvspan(-margin, margin, color=VERDICTS[EQUAL]["color"], alpha=0.12, lw=0, zorder=0)
    ends = [0.0, *(end for row in rows for end in (row.mean, row.low, row.high) if end is not None)]
    space = 0.05 * (max(ends) - min(ends)) or 0.01
    axes.set(xlim=(min(ends) - space, max(ends) + space), ylim=(y + 0.8, 0.4), yticks=[])
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)


def row_height(label: Sequence[str]) -> float:
    """Of a label and its bar, in lines."""
    return len(label) + 1.5


def wrapped(label: str) -> list[str]:
    """The lines of a label."""
    return textwrap.wrap(plot_style.escape(label), LABEL_WIDTH, break_long_words=False)
