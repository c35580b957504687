"""loss.png of a run: losses, learning rates and gradient norms during training."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.model.runs import partial_validation
from tril.model.training.callbacks.gradient_norms import GradientNorms
from tril.model.training.callbacks.metrics import Metrics, comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_losses(
    path: Path, metrics: Metrics, *, title: str, initial: float | None, gradients: GradientNorms | None = None
) -> None:
    """Plots the losses, the learning rates, and gradient norms if there are any, into a PNG.

    Args:
        title: of the run.
        initial: loss of uniform probabilities, where a run from random weights starts; None: it started from a model.
        gradients: the run's gradient norms; None: not measured.
    """
    from matplotlib.figure import Figure  # not pyplot, which looks for a display
    from matplotlib.ticker import StrMethodFormatter

    rates = metrics.train
    norms = gradients.rows if gradients is not None else []
    heights = [3.0, *([0.7] if rates else []), *([1.3] if norms else [])]
    figure = Figure(figsize=(6, 1.6 + 1.1 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    plot_loss(panels[0], metrics, initial)
    if rates:
        plot_rates(panels[1], rates)
    if norms:
        plot_norms(panels[-1], norms)
    figure.suptitle(title, fontsize=11, parse_math=False)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    last = max((row["step"] for row in (*metrics.train, *metrics.val)), default=1)
    panels[-1].set_xlim(0, 1.02 * max(1, last))
    for each in panels:
        each.grid(alpha=0.3)
    figure.align_ylabels(panels)
    figure.savefig(path, dpi=150)


def plot_loss(axes: "Axes", metrics: Metrics, initial: float | None) -> None:
    """Plots training and validation losses; `initial`: see `plot_losses`."""
    train, val = metrics.train, comparable(metrics.val)
    axes.plot(steps_of(train), [row["loss"] for row in train], lw=1.2, label="training")
    label = "validation"
    if val:
        part = partial_validation(val[-1].get("windows"))
        label += f" on {part}" if part else ""
        best = min(val, key=lambda row: row["loss"])
        label += f", best {best['loss']:.4f} ({best['bpb']:.4f} bits per byte)"
    axes.plot(steps_of(val), [row["loss"] for row in val], lw=1.2, marker="o", ms=4, label=label)
    losses = [row["loss"] for row in train + val if math.isfinite(row["loss"])]
    if losses:  # what exceeds both the start and 2.5 times the lowest loss is cut, so that the rest is readable
        margin = max(0.1, 0.01 * min(losses))
        top = max(min(max(losses), 2.5 * min(losses)), initial or 0)
        axes.set_ylim(min(losses) - margin, top + 2 * margin)
    if initial is not None:
        axes.axhline(initial, color="0.4", ls="--", lw=1, label=f"ln V = {initial:.2f}, the loss of a uniform guess")
    axes.set_ylabel("loss, nats per token")
    axes.legend(fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.93))  # below the dashed line


def plot_rates(axes: "Axes", rows: list[dict]) -> None:
    """Plots the learning rate of each group of the optimizer; groups with equal rates are one line."""
    names: dict[tuple[float, ...], list[str]] = {}
    for name in rows[0]["lr"]:
        names.setdefault(tuple(row["lr"][name] for row in rows), []).append(name)
    for values, groups in names.items():
        axes.plot(steps_of(rows), values, lw=1, label=", ".join(groups))
    axes.set_ylabel("learning\nrate")
    axes.set_ylim(bottom=0)
    add_legend(axes)


def plot_norms(axes: "Axes", rows: list[dict]) -> None:
    """Plots the gradient norms of `GradientNorms.rows`: of all parameters, and of each group of the optimizer."""
    from matplotlib.ticker import StrMethodFormatter

    names = [name for name in rows[0] if name not in ("step", "total")]
    for name in ["total", *names]:
        style: dict[str, Any] = {"color": "black", "lw": 1.2} if name == "total" else {"lw": 0.8}
        axes.plot(steps_of(rows), [row[name] for row in rows], label=name, **style)
    axes.set(ylabel="gradient\nnorm", yscale="log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    add_legend(axes)


def add_legend(axes: "Axes") -> None:
    """Names the lines of a thin panel above it."""
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.97), borderaxespad=0)


def steps_of(rows: list[dict]) -> list[int]:
    return [row["step"] for row in rows]
