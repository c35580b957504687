"""Plots of the validation loss during training, against tokens, FLOPs and time.

A thin line is a finished run, a thick one the mean of a variant's finished runs; an unfinished run is dotted.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tril.scripts.ablation import plot_style
from tril.scripts.ablation.results import Sweep, Variant
from tril.scripts.ablation.run_files import Run

AXES = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}
MAX_LOSS_RATIO = 2.5  # largest loss shown / median loss: a diverged run does not squeeze the others


@dataclass(frozen=True)
class Curve:
    """Validation loss (n,) of a run, or the mean of several, at the positions `x` (n,)."""

    x: np.ndarray
    loss: np.ndarray

    def later_half(self) -> "Curve":
        later = self.x >= self.x[-1] / 2
        return Curve(self.x[later], self.loss[later])


@dataclass(frozen=True)
class VariantCurves:
    """The mean over the finished runs of a variant, if there are any, and each of its runs."""

    mean: Curve | None
    finished: list[Curve]
    unfinished: list[Curve]

    @classmethod
    def of(cls, variant: Variant, along: str) -> "VariantCurves":
        runs: dict[bool, list[Curve]] = {True: [], False: []}
        for run in variant.runs:
            if (curve := mean_curve([run], along)) is not None:
                runs[run.state == "finished"].append(curve)
        return cls(mean_curve(variant.finished, along), runs[True], runs[False])

    def every(self) -> list[Curve]:
        return [*([self.mean] if self.mean else []), *self.finished, *self.unfinished]


def plot_curves(sweep: Sweep) -> Iterator[tuple[Any, plot_style.Picture]]:
    """A figure for each axis of AXES: whole runs above; below their later halves, where variants separate."""
    for along, words in AXES.items():
        curves = {variant.label: VariantCurves.of(variant, along) for variant in sweep.variants}
        styles = {label: style for label, style in plot_style.line_styles(sweep).items() if curves[label].every()}
        every = [curve for label in styles for curve in curves[label].every()]
        if all(len(curve.x) < 2 for curve in every):  # one validation is no curve, and final_loss.png shows it
            continue
        figure = plot_style.new_figure(6.0)
        above, below = figure.subplots(2, 1)
        views = [(above, "whole runs", every), (below, "their later halves", [curve.later_half() for curve in every])]
        for axes, title, shown in views:
            for label, style in styles.items():
                plot_lines(axes, curves[label], style)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set(xlabel=words, ylabel=plot_style.LOSS)
            plot_style.engineering_axis(axes, plot_style.is_wide([curve.x[-1] for curve in every]))
            set_limits(axes, shown)
        plot_style.add_legend(figure, styles)
        title, caption = f"Validation loss against {words}", curve_caption(sweep, curves, along)
        section = "curves" if along == "tokens" else "costs"
        yield figure, plot_style.Picture(f"loss_{along}.png", title, caption, section)


def plot_lines(axes, curves: VariantCurves, style: Mapping[str, Any]) -> None:
    """The mean of a variant, its finished runs if there are several, and its unfinished runs."""
    for curve in curves.finished if len(curves.finished) > 1 else []:
        axes.plot(curve.x, curve.loss, lw=0.6, alpha=0.55, color=style["color"])
    if curves.mean is not None:
        axes.plot(curves.mean.x, curves.mean.loss, lw=1.8, ms=3, **style)
    for curve in curves.unfinished:
        axes.plot(curve.x, curve.loss, lw=0.9, marker=".", ms=3, ls=":", color=style["color"])


def mean_curve(runs: Sequence[Run], along: str) -> Curve | None:
    """Mean over runs at the steps that all of them have; None if there are none, or if the axis is unknown."""
    factors = [(plot_style.size(run, "flops_per_token") or math.nan) if along == "flops" else 1.0 for run in runs]
    column = "tokens" if along == "flops" else along
    positions = [run.curve[column] * factor for run, factor in zip(runs, factors, strict=True)]
    steps = [run.curve["step"][np.isfinite(x)] for run, x in zip(runs, positions, strict=True)]
    shared = functools.reduce(np.intersect1d, steps) if runs else np.array([])
    rows = [np.isin(run.curve["step"], shared) for run in runs]
    losses = np.array([run.curve["loss"][row] for run, row in zip(runs, rows, strict=True)])  # (runs, n)
    if not np.isfinite(losses).any():
        return None
    x = np.mean([x[row] for x, row in zip(positions, rows, strict=True)], axis=0)
    return Curve(x, losses.mean(0))


def set_limits(axes, shown: Sequence[Curve]) -> None:
    """Fits both axes to the curves, without losses that are far above the median."""
    values = np.concatenate([curve.loss for curve in shown])
    if np.isfinite(values).any():
        values = values[np.isfinite(values)]
        low, high = values.min(), min(values.max(), MAX_LOSS_RATIO * np.median(values))
        margin = 0.04 * (high - low) or 0.01 * abs(high)
        axes.set_ylim(low - margin, high + margin)
    to_axis, from_axis = axes.transData.transform, axes.transData.inverted().transform  # on any scale
    ends = [to_axis((end, 1))[0] for end in (min(curve.x[0] for curve in shown), max(curve.x[-1] for curve in shown))]
    margin = 0.03 * (ends[1] - ends[0]) or 9
    axes.set_xlim(*(from_axis((end, 0))[0] for end in (ends[0] - margin, ends[1] + margin)))


def curve_caption(sweep: Sweep, curves: Mapping[str, VariantCurves], along: str) -> str:
    """Explains the lines that are drawn."""
    lines = []
    if any(len(each.finished) > 1 for each in curves.values()):
        lines.append(
            "A thin line is one seed, a thick line the mean over a variant's finished seeds at the steps that all of "
            "them have."
        )
    if curves[sweep.baseline.label].mean is not None and len(curves) > 1:
        lines.append("The baseline is dashed.")
    if any(each.unfinished for each in curves.values()):
        lines.append("A thin dotted line is a single unfinished run, as far as it got.")
    if along == "seconds":
        lines.append(
            "Time counts training alone, without validation; a point of a mean is at the mean time of its seeds."
        )
    return " ".join(lines)
