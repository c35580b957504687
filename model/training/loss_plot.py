"""loss.png of a run: losses, learning rates and gradient norms during training."""

import math
from pathlib import Path

from tril.model.runs import partial_validation
from tril.model.training.callbacks.metrics import Metrics


def plot_losses(path: Path, metrics: Metrics, title: str, *, initial: float | None) -> None:
    """Plots the losses, and below them the learning rates and the gradient norms of the optimizer's groups.

    Args:
        path: of a PNG.
        initial: loss of uniform probabilities, where a run from random weights starts; None: it started from a model.
    """
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    train, val = metrics.train, metrics.val
    figure = Figure(figsize=(6, 7), layout="constrained")
    top, *panels = figure.subplots(3, sharex=True, height_ratios=(3, 0.7, 1.3))
    steps = [row["step"] for row in train]
    top.plot(steps, [row["loss"] for row in train], lw=1.2, label="training")
    if val:
        part = partial_validation(metrics.val_windows)
        label = f"validation{f' on {part}' if part else ''}, best {metrics.best()['loss']:.4f}"
        label += f" ({metrics.best()['bpb']:.4f} bits per byte)"
        top.plot([row["step"] for row in val], [row["loss"] for row in val], lw=1.2, marker="o", ms=4, label=label)
    if initial is not None:
        top.axhline(initial, color="0.4", ls="--", lw=1, label=f"ln V = {initial:.2f}, the loss of a uniform guess")
    if losses := [row["loss"] for row in train + val]:
        # what exceeds both the start and 2.5 times the lowest loss is cut, so that the rest is readable
        margin = max(0.1, 0.01 * min(losses))
        limit = max(min(max(losses), 2.5 * min(losses)), initial or 0)
        top.set_ylim(min(losses) - margin, limit + 2 * margin)
    top.set_ylabel("loss, nats per token")
    top.legend(fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.93))  # below the dashed line
    for axes, key, label in zip(panels, ("lr", "grad_norm"), ("learning\nrate", "gradient\nnorm"), strict=True):
        for name in train[0][key] if train else ():
            axes.plot(steps, [row[key].get(name, math.nan) for row in train], lw=0.8, label=name)
        axes.set_ylabel(label)
        axes.legend(ncols=5, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.97), borderaxespad=0)
    panels[1].set_yscale("log")
    panels[1].set_xlabel("step")
    for axes in (top, *panels):
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)
