"""The picture of an evaluation: the loss against the position in the window."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_positions(path: str | Path, protocols: Mapping[str, Mapping[str, Any]]) -> None:
    """PNG.

    Args:
        protocols: for each kind of windows, the report of its `ScoredText`.
    """
    from matplotlib.figure import Figure  # not pyplot, which may look for a display

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for found in protocols.values():
        x = [(row["first"] * row["last"]) ** 0.5 for row in found["positions"]]
        losses = [row["loss"] for row in found["positions"]]
        ends = [[abs((end or loss.mean) - loss.mean) for end in (loss.low, loss.high)] for loss in losses]
        y, errors = [loss.mean for loss in losses], list(zip(*ends, strict=True))
        axes.errorbar(x, y, errors, marker="o", ms=4, capsize=3, label=found["name"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(title="Loss against position", xlabel="tokens of context", ylabel="loss, nats per token")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130, format="png")
