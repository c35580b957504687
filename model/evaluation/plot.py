"""The picture of an evaluation: the loss against the position in the window, and the calibration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tril.model.intervals import Interval

COLORS = ("tab:blue", "tab:orange")


def plot(path: str | Path, protocols: Mapping[str, Mapping[str, Any]]) -> None:
    """PNG.

    Args:
        protocols: for each kind of windows, the report of its `ScoredText`.
    """
    from matplotlib.figure import Figure  # not pyplot, which may look for a display

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    right.plot([0, 1], [0, 1], color="0.6", ls="--", label="calibrated")
    for found, color in zip(protocols.values(), COLORS, strict=False):
        rows = found["positions"]
        middles = [(row["first"] * row["last"]) ** 0.5 for row in rows]
        _draw(left, middles, [row["loss"] for row in rows], color, found["name"])
        rows = found["calibration"]
        _draw(right, [row["confidence"] for row in rows], [row["accuracy"] for row in rows], color, found["name"])
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:g}")
    left.set(title="Loss against position", xlabel="tokens of context", ylabel="loss, nats per token")
    right.set(title="Calibration", xlabel="probability of the most probable token", ylabel="accuracy")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130, format="png")


def _draw(axes, x: Sequence[float], intervals: Sequence[Interval], color: str, label: str) -> None:
    """Means with their intervals; a mean without an interval is a point."""
    low = [0.0 if i.low is None else i.mean - i.low for i in intervals]
    high = [0.0 if i.high is None else i.high - i.mean for i in intervals]
    axes.errorbar(x, [i.mean for i in intervals], [low, high], color=color, marker="o", ms=4, capsize=3, label=label)
