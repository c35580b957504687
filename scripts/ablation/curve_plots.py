"""Plots of the validation loss during training, against tokens, FLOPs and time.

Means and intervals are over the seeds of finished runs; an unfinished run is a thin dashed line as far as it got.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tril.model.intervals import mean_interval
from tril.scripts.ablation import plot_style
from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.run_files import Run

AXES = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}
MAX_LOSS_RATIO = 2.5  # largest loss shown / median loss: a diverged run does not squeeze the others


@dataclass(frozen=True)
class Curve:
    """Mean validation loss at the positions `x` (n,) with its interval; NaN without one (one run, or not finite)."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def later_half(self) -> "Curve":
        return Curve(*(getattr(self, name)[self.x >= self.x[-1] / 2] for name in ("x", "mean", "low", "high")))


def plot_curves(sweep: Sweep) -> Iterator[tuple[Any, plot_style.Picture]]:
    """A figure for each axis of AXES: whole runs above; below their later halves, where variants separate."""
    for along, words in AXES.items():
        means = {variant.label: curve for variant in sweep.variants if (curve := mean_curve(variant.finished, along))}
        single = {
            variant.label: [
                curve
                for run in variant.runs
                if run.state != "finished" and (curve := mean_curve([run], along)) is not None
            ]
            for variant in sweep.variants
        }
        styles = {
            label: style for label, style in plot_style.line_styles(sweep).items() if label in means or single[label]
        }
        every = [*means.values(), *(curve for curves in single.values() for curve in curves)]
        if all(len(curve.x) < 2 for curve in every):  # one validation is no curve, and final_loss.png shows it
            continue
        figure = plot_style.new_figure(6.4)
        above, below = figure.subplots(2, 1)
        views = [(above, "whole runs", every), (below, "their later halves", [curve.later_half() for curve in every])]
        for axes, title, shown in views:
            plot_lines(axes, styles, means, single)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set(xlabel=words, ylabel=plot_style.LOSS)
            plot_style.engineering_axis(axes, plot_style.is_wide([curve.x[-1] for curve in every]))
            set_limits(axes, shown)
        plot_style.add_legend(figure, styles)
        caption = curve_caption(means, any(single.values()), along)
        yield figure, plot_style.Picture(f"loss_{along}.png", f"Validation loss against {words}", caption)


def plot_lines(axes, styles: Mapping[str, dict], means: Mapping[str, Curve], single: Mapping[str, list[Curve]]) -> None:
    """The mean of each variant with its interval, and its unfinished runs."""
    for label, style in styles.items():
        if label in means:
            mean = means[label]
            axes.plot(mean.x, mean.mean, lw=1.5, ms=2.5, **style)
            axes.fill_between(mean.x, mean.low, mean.high, color=style["color"], alpha=0.18, lw=0)
        for curve in single[label]:
            axes.plot(curve.x, curve.mean, lw=0.9, marker=".", ms=3, ls="--", color=style["color"])


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
    intervals = [mean_interval(column) for column in losses.T]
    x = np.mean([x[row] for x, row in zip(positions, rows, strict=True)], axis=0)
    # None becomes NaN
    return Curve(x, *(np.array([getattr(each, name) for each in intervals], float) for name in ("mean", "low", "high")))


def set_limits(axes, shown: Sequence[Curve]) -> None:
    """Fits both axes to the curves, without losses that are far above the median."""
    means = np.concatenate([curve.mean for curve in shown])
    if np.isfinite(means).any():
        values = np.concatenate([means, *(side for curve in shown for side in (curve.low, curve.high))])
        values = values[np.isfinite(values)]
        low, high = values.min(), min(values.max(), MAX_LOSS_RATIO * np.median(means[np.isfinite(means)]))
        margin = 0.04 * (high - low) or 0.01 * abs(high)
        axes.set_ylim(low - margin, high + margin)
    to_axis, from_axis = axes.transData.transform, axes.transData.inverted().transform  # on any scale
    ends = [to_axis((end, 1))[0] for end in (min(curve.x[0] for curve in shown), max(curve.x[-1] for curve in shown))]
    margin = 0.03 * (ends[1] - ends[0]) or 9
    axes.set_xlim(*(from_axis((end, 0))[0] for end in (ends[0] - margin, ends[1] + margin)))


def curve_caption(means: Mapping[str, Curve], unfinished: bool, along: str) -> str:
    """Explains the lines and bands that are drawn."""
    has_band = [np.isfinite(curve.low).any() for curve in means.values()]
    lines = []
    if any(has_band):
        mean = "A line is the mean over a variant's finished seeds at the steps that all of them have"
        lines.append(f"{mean}, its band the 95 % interval.")
    if not all(has_band):
        lines.append("A line without a band is one seed: no interval.")
    if unfinished:
        lines.append("A thin dashed line is a single unfinished run, as far as it got.")
    if along == "seconds":
        lines.append("Time counts training alone, without validation; a point is at the mean time of its seeds.")
    return " ".join(lines)
