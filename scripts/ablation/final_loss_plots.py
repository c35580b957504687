"""Plots of the final or best loss: by variant, along a swept number, for each pair of keys, against size."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tril.model.intervals import Interval
from tril.scripts.ablation import plot_style
from tril.scripts.ablation.results import Sweep, text_of

COSTS = {"parameters": "parameters", "training_flops": "training FLOPs"}
SIZE_TOLERANCE = 1.01  # largest / smallest size from which the sizes of variants differ

Losses = Mapping[str, Interval]  # label -> final or best loss


def plot_final_losses(sweep: Sweep, which: str, losses: Losses) -> Iterator[tuple[Any, plot_style.Picture]]:
    """The loss of each seed and the mean of each variant; with two swept keys also the means along each of them."""
    positions = [axis_positions([variant.values[key] for variant in sweep.variants]) for key in sweep.keys]
    numeric = all(plot_style.is_number(variant.values[key]) for variant in sweep.variants for key in sweep.keys)
    along = len(positions) == 1 and len(positions[0]) > 1 and numeric
    axes = plot_along(sweep, which, losses, positions, 0) if along else plot_rows(sweep, which, losses)
    title = f"{which.capitalize()} loss of each seed, and the mean over seeds"
    axes.figure.suptitle(title, fontsize=10)
    caption = (
        "A large point is the mean over finished seeds, a small gray dot is one seed. A thin gray line connects the "
        "runs of one seed: the verdict is about the differences along these lines, not about the spread of the seeds."
    )
    plot_seeds(axes, sweep, which, positions[0] if along else None)
    if sweep.baseline.label in losses:
        line = axes.axhline if along else axes.axvline
        line(losses[sweep.baseline.label].mean, color="0.5", ls="--", lw=0.9, zorder=0)
        caption += " The dashed line is the baseline's mean."
    yield axes.figure, plot_style.Picture(f"{which}_loss.png", title, caption, "losses")
    if len(positions) == 2 and min(map(len, positions)) > 1:
        caption = (
            "Means over finished seeds with their 95 % intervals (one seed: no interval), shifted slightly to avoid "
            "overlap. Parallel lines mean that the effect of one setting is the same for every value of the other."
        )
        for x, key in enumerate(sweep.keys):
            axes = plot_along(sweep, which, losses, positions, x)
            yield (
                axes.figure,
                plot_style.Picture(
                    f"interaction_{x + 1}.png", f"{key} for each {sweep.keys[1 - x]}", caption, "losses"
                ),
            )


def plot_rows(sweep: Sweep, which: str, losses: Losses):
    """A row for each variant."""
    labels = ["\n".join(textwrap.wrap(plot_style.escape(variant.label), 34)) for variant in sweep.variants]
    axes = plot_style.new_figure(0.9 + 0.17 * sum(label.count("\n") + 2 for label in labels)).subplots()
    styles = plot_style.line_styles(sweep)
    for row, variant in enumerate(sweep.variants):
        if variant.label in losses:
            style: dict[str, Any] = styles[variant.label] | {"ls": "none"}
            axes.plot(losses[variant.label].mean, -row, **style, ms=9)
    axes.set_yticks([-row for row in range(len(labels))], labels)
    axes.set_xlabel(f"{which} {plot_style.LOSS}", loc="right")  # may be wider than the axes
    axes.set(ylim=(0.5 - len(labels), 0.5))
    return axes


def plot_along(sweep: Sweep, which: str, losses: Losses, positions: Sequence[dict[str, float]], x: int):
    """The loss against key number x of one or two, with a line for each value of the other key."""
    other = sweep.keys[1 - x] if len(sweep.keys) == 2 else None
    lines = list(positions[1 - x]) if other else [""]
    colors = plot_style.COLORS if len(lines) <= len(plot_style.COLORS) else plot_style.sequential_colors(len(lines))
    axes, styles = plot_style.new_figure(4.0).subplots(), {}
    span = max(positions[x].values()) - min(positions[x].values())
    for i, line in enumerate(lines):
        style, shift, means = {"color": colors[i], "marker": "o"}, 0.02 * span * (i - (len(lines) - 1) / 2), {}
        for variant in sweep.variants:
            if variant.label in losses and (other is None or text_of(variant.values[other]) == line):
                at = positions[x][text_of(variant.values[sweep.keys[x]])] + shift
                means[at] = losses[variant.label].mean
                if other:
                    plot_point(axes, at, losses[variant.label], style)
                else:
                    axes.plot(at, losses[variant.label].mean, **style, ms=9)
        axes.plot(sorted(means), [means[at] for at in sorted(means)], lw=1.1, color=colors[i])
        if other:
            styles[f"{other}={line}"] = style
    ticks: dict[str, float] = {}
    for value, at in positions[x].items():  # skip labels that would overlap an earlier one
        if all(abs(at - tick) >= span * (0.008 * len(value + text) + 0.01) for text, tick in ticks.items()):
            ticks[value] = at
    axes.set_xticks(list(ticks.values()), ["\n".join(textwrap.wrap(plot_style.escape(value), 12)) for value in ticks])
    axes.set(xlabel=plot_style.escape(sweep.keys[x]), ylabel=f"{which} {plot_style.LOSS}")
    plot_style.add_legend(axes.figure, styles)
    return axes


def plot_by_size(sweep: Sweep, which: str, losses: Losses) -> Iterator[tuple[Any, plot_style.Picture]]:
    """The loss against parameters and training FLOPs, if these differ between variants."""
    for name, words in COSTS.items():
        sizes = {v.label: plot_style.size(v.finished[0], name) for v in sweep.variants if v.label in losses}
        sizes = {label: value for label, value in sizes.items() if value}
        if not sizes or max(sizes.values()) < SIZE_TOLERANCE * min(sizes.values()):
            continue
        styles = {
            label: style | {"ls": "none"} for label, style in plot_style.line_styles(sweep).items() if label in sizes
        }
        axes = plot_style.new_figure(4.0).subplots()
        for label, style in styles.items():
            plot_point(axes, sizes[label], losses[label], style)
        axes.set(xlabel=words, ylabel=f"{which} {plot_style.LOSS}")
        plot_style.engineering_axis(axes, plot_style.is_wide(list(sizes.values())))
        plot_style.add_legend(axes.figure, styles)
        title = f"{which.capitalize()} validation loss against {words}"
        caption = "Means over finished seeds with their 95 % intervals (one seed: no interval)."
        yield axes.figure, plot_style.Picture(f"{which}_loss_{name}.png", title, caption, "costs")


def plot_seeds(axes, sweep: Sweep, which: str, positions: Mapping[str, float] | None) -> None:
    """A dot for each finished run, and a line through the runs of each seed.

    Args:
        positions: on the x axis, of the texts of the values of the swept number; None: the variants are rows.
    """
    lines: dict[int, list[tuple[float, float]]] = {}
    for row, variant in enumerate(sweep.variants):
        for run in variant.finished:
            loss = (run.summary or {}).get(f"{which}_val_loss")
            if loss is not None and math.isfinite(loss):
                at = -row if positions is None else positions[text_of(variant.values[sweep.keys[0]])]
                lines.setdefault(run.seed, []).append((at, loss))
    for points in lines.values():
        at, seed_losses = zip(*sorted(points), strict=True)
        x, y = (seed_losses, at) if positions is None else (at, seed_losses)
        axes.plot(x, y, lw=0.7, color="0.7", marker="o", ms=3.5, mfc="0.8", mec="0.2", mew=0.5, zorder=3)


def plot_point(axes, at: float, loss: Interval, style: dict) -> None:
    """A mean, and its interval if it has one."""
    bar = None if loss.low is None or loss.high is None else [[loss.mean - loss.low], [loss.high - loss.mean]]
    axes.errorbar(at, loss.mean, yerr=bar, **style | {"ls": "none"}, ms=5.5, capsize=3, lw=1.4)


def axis_positions(values: Sequence[object]) -> dict[str, float]:
    """Text of each value -> its position on an axis.

    Numbers are in order, on a logarithmic scale if they are powers of two or span a wide range; other values are side
    by side in the order of the sweep.
    """
    numbers = [value for value in values if plot_style.is_number(value)]
    if len(numbers) < len(values):
        return {text: float(i) for i, text in enumerate(dict.fromkeys(map(text_of, values)))}
    numbers.sort()
    log = numbers[0] > 0 and (all(math.log2(value).is_integer() for value in numbers) or plot_style.is_wide(numbers))
    return {text_of(value): math.log2(value) if log else float(value) for value in numbers}
