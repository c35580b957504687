"""The pictures of a sweep's report, as PNGs: losses while training, final losses by variant, by two keys and by size.

Means and intervals are over the seeds of finished runs; a run that has not finished is drawn by itself, thin and dashed, as far as it goes.
"""

import functools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tril.model.intervals import Interval, mean_interval
from tril.scripts.ablation.results import Run, Sweep, Variant, text_of

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
    "#8c6d31",
)  # colour-blind readers tell them apart
MARKS = (("-", "o"), ("-.", "s"), (":", "^"), ((0, (8, 1)), "D"))  # line and marker of each round of the colours
ALONG = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}
COSTS = {"parameters": "parameters", "training_flops": "training FLOPs"}
LOSS = "validation loss, nats per token"
WIDE = 8  # largest / smallest from which numbers stand on a logarithmic axis
DIFFERENT = 1.01  # largest / smallest from which variants count as of different size


@dataclass(frozen=True)
class Picture:
    """A PNG in the report's folder and the words around it."""

    file: str
    title: str
    caption: str


@dataclass(frozen=True)
class Curve:
    """Mean validation loss at places (n,) with its interval; nan where there is none: one run, or a loss that is not finite."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def half(self) -> "Curve":
        """From the middle of its length on."""
        return Curve(*(getattr(self, name)[self.x >= self.x[-1] / 2] for name in ("x", "mean", "low", "high")))


def draw(sweep: Sweep, which: str, folder: Path) -> list[Picture]:
    """Writes the pictures that this sweep has something to show in; `which` loss is final or best."""
    found = {variant.label: estimate(variant, f"{which}_val_loss") for variant in sweep.variants}
    found = {label: interval for label, interval in found.items() if interval and math.isfinite(interval.mean)}
    pictures = list(curves(sweep, folder))
    return (
        [*pictures, *final_losses(sweep, which, found, folder), *by_size(sweep, which, found, folder)]
        if found
        else pictures
    )


def estimate(variant: Variant, name: str) -> Interval | None:
    """Mean and interval over the finished seeds of one figure of the summaries; None where no summary has it."""
    values = [run.summary[name] for run in variant.finished if run.summary.get(name) is not None]
    return mean_interval(values) if values else None


def size(run: Run, name: str) -> float | None:
    """A figure that is known before training too, as measured or else as planned; "training_flops" of a finished run."""
    if name == "training_flops":
        per_token, tokens = size(run, "flops_per_token"), (run.summary or {}).get("tokens")
        return None if per_token is None or tokens is None else per_token * tokens
    measured = (run.summary or {}).get(name)
    return run.planned.get(name) if measured is None else measured


def curves(sweep: Sweep, folder: Path) -> Iterator[Picture]:
    """Validation loss against tokens, FLOPs and time: above the whole runs, below their later halves, where variants part."""
    for along, words in ALONG.items():
        means = {variant.label: curve for variant in sweep.variants if (curve := mean_curve(variant.finished, along))}
        unfinished = {
            variant.label: [run for run in variant.runs if run.state != "finished"] for variant in sweep.variants
        }
        parts = {
            label: [curve for run in some if (curve := mean_curve([run], along))] for label, some in unfinished.items()
        }
        styles = {label: style for label, style in line_styles(sweep).items() if label in means or parts[label]}
        if not styles:
            continue
        every = [*means.values(), *(curve for some in parts.values() for curve in some)]
        figure, views = new_figure(6.4), {"whole runs": every, "their later halves": [curve.half() for curve in every]}
        for axes, (title, shown) in zip(figure.subplots(2, 1), views.items()):
            for label, style in styles.items():
                if label in means:
                    mean = means[label]
                    axes.plot(mean.x, mean.mean, lw=1.5, ms=2.5, **style)
                    axes.fill_between(mean.x, mean.low, mean.high, color=style["color"], alpha=0.18, lw=0)
                for curve in parts[label]:
                    axes.plot(curve.x, curve.mean, lw=0.9, marker=".", ms=3, ls="--", color=style["color"])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set(xlabel=words, ylabel=LOSS)
            engineering(axes, max(curve.x[-1] for curve in every) > WIDE * min(curve.x[-1] for curve in every))
            limit(axes, shown)
        add_legend(figure, styles)
        caption = curve_caption(means, any(parts.values()), along)
        yield saved(figure, folder / f"loss_{along}.png", f"Validation loss against {words}", caption)


def mean_curve(runs: Sequence[Run], along: str) -> Curve | None:
    """Mean over runs at the steps that all of them have; None where there are none, or where the axis is not known."""
    scale = [(size(run, "flops_per_token") or math.nan) if along == "flops" else 1.0 for run in runs]
    places = [run.curve["tokens" if along == "flops" else along] * factor for run, factor in zip(runs, scale)]
    steps = [run.curve["step"][np.isfinite(x)] for run, x in zip(runs, places)]
    shared = functools.reduce(np.intersect1d, steps) if runs else np.array([])
    rows = [np.isin(run.curve["step"], shared) for run in runs]
    losses = np.array([run.curve["loss"][row] for run, row in zip(runs, rows)])  # (runs, n)
    if not np.isfinite(losses).any():
        return None
    intervals = [mean_interval(column) for column in losses.T]
    sides = [
        np.array([getattr(interval, side) for interval in intervals], float) for side in ("mean", "low", "high")
    ]  # None becomes nan
    return Curve(np.mean([x[row] for x, row in zip(places, rows)], axis=0), *sides)


def limit(axes, shown: list[Curve]) -> None:
    """Both axes to what is shown; a loss that exploded, or one from before learning began, does not squeeze the rest."""
    means = np.concatenate([curve.mean for curve in shown])
    if np.isfinite(means).any():
        means = means[np.isfinite(means)]
        every = np.concatenate(
            [means, *(side[np.isfinite(side)] for curve in shown for side in (curve.low, curve.high))]
        )
        low, high = every.min(), min(every.max(), 2.5 * np.median(means))
        margin = 0.04 * (high - low) or 0.01 * abs(high)
        axes.set_ylim(low - margin, high + margin)
    to_axis = axes.transData.transform_point  # whatever its scale
    ends = [to_axis((end, 1))[0] for end in (min(curve.x[0] for curve in shown), max(curve.x[-1] for curve in shown))]
    margin = 0.03 * (ends[1] - ends[0]) or 9
    axes.set_xlim(*(axes.transData.inverted().transform((end, 0))[0] for end in (ends[0] - margin, ends[1] + margin)))


def curve_caption(means: dict[str, Curve], unfinished: bool, along: str) -> str:
    """What the lines and bands of a picture of curves are, in words."""
    banded = [np.isfinite(curve.low).any() for curve in means.values()]
    said = {
        "A line is the mean over a variant's finished seeds at the steps that all of them have, its band the 95 % interval.": any(
            banded
        ),
        "A line without a band is one seed: no interval.": not all(banded),
        "A thin dashed line is a single run that has not finished, as far as it goes.": unfinished,
        "Time counts training alone, without validation; a point of a mean stands at the mean time of its seeds.": along
        == "seconds",
    }
    return " ".join(line for line, applies in said.items() if applies)


def saved(figure, path: Path, title: str, caption: str) -> Picture:
    figure.savefig(path, dpi=150)
    return Picture(path.name, title, caption)


def final_losses(sweep: Sweep, which: str, found: dict[str, Interval], folder: Path) -> Iterator[Picture]:
    """The loss of each variant with its interval, beside its seeds: by variant or along its number, and for two keys along either."""
    caption = "A large point is the mean over finished seeds with its 95 % interval (one seed: no interval), a small grey dot is one seed."
    places = [positions([variant.values[key] for variant in sweep.variants]) for key in sweep.keys]
    along = (
        len(places) == 1
        and len(places[0]) > 1
        and all(is_number(variant.values[sweep.keys[0]]) for variant in sweep.variants)
    )
    axes = draw_along(sweep, which, found, places, 0) if along else draw_rows(sweep, which, found)
    if sweep.baseline.label in found:
        (axes.axhline if along else axes.axvline)(
            found[sweep.baseline.label].mean, color="0.5", ls="--", lw=0.9, zorder=0
        )
        caption += " The dashed line is the baseline's mean."
    yield saved(axes.figure, folder / f"{which}_loss.png", f"{which.capitalize()} validation loss", caption)
    if len(places) == 2 and min(map(len, places)) > 1:
        caption = (
            "Means over finished seeds with their 95 % intervals (one seed: no interval), moved a little so that none hides another. Where "
            "lines are parallel, what one setting does is the same for every value of the other."
        )
        for x, key in enumerate(sweep.keys):
            axes = draw_along(sweep, which, found, places, x)
            yield saved(
                axes.figure, folder / f"interaction_{x + 1}.png", f"{key} for each {sweep.keys[1 - x]}", caption
            )


def draw_rows(sweep: Sweep, which: str, found: dict[str, Interval]):
    """A row for each variant."""
    labels = ["\n".join(textwrap.wrap(plain(variant.label), 34)) for variant in sweep.variants]
    axes, styles = (
        new_figure(0.9 + 0.17 * sum(label.count("\n") + 2 for label in labels)).subplots(),
        line_styles(sweep),
    )
    for row, variant in enumerate(sweep.variants):
        if variant.label in found:
            draw_point(axes, -row, found[variant.label], styles[variant.label], seeds(variant, which), upright=False)
    axes.set_yticks([-row for row in range(len(labels))], labels)
    axes.set(xlabel=f"{which} {LOSS}", ylim=(0.5 - len(labels), 0.5))
    return axes


def draw_along(sweep: Sweep, which: str, found: dict[str, Interval], places: list[dict[str, float]], x: int):
    """The loss against key number x of one or two, with a line for each value of the other."""
    lines = list(places[1 - x]) if len(sweep.keys) == 2 else [""]
    colours = COLOURS if len(lines) <= len(COLOURS) else sequential(len(lines))
    styles = {
        f"{sweep.keys[1 - x]}={line}": {"color": colour, "marker": "o"} for line, colour in zip(lines, colours) if line
    }
    axes = new_figure(4.0).subplots()
    span = max(places[x].values()) - min(places[x].values())
    for i, line in enumerate(lines):
        shift, means = 0.02 * span * (i - (len(lines) - 1) / 2), {}
        for variant in sweep.variants:
            if variant.label in found and line in ("", text_of(variant.values[sweep.keys[x - 1]])):
                at = places[x][text_of(variant.values[sweep.keys[x]])] + shift
                means[at] = found[variant.label].mean
                draw_point(
                    axes,
                    at,
                    found[variant.label],
                    {"color": colours[i], "marker": "o"},
                    [] if line else seeds(variant, which),
                )
        axes.plot(sorted(means), [means[at] for at in sorted(means)], lw=1.1, color=colours[i])
    shown: dict[str, float] = {}
    for value, at in places[x].items():  # a value is not written where it would run into one before it
        if all(abs(at - other) >= span * (0.008 * len(value + word) + 0.01) for word, other in shown.items()):
            shown[value] = at
    axes.set_xticks(list(shown.values()), ["\n".join(textwrap.wrap(plain(value), 12)) for value in shown])
    axes.set(xlabel=plain(sweep.keys[x]), ylabel=f"{which} {LOSS}")
    add_legend(axes.figure, styles)
    return axes


def by_size(sweep: Sweep, which: str, found: dict[str, Interval], folder: Path) -> Iterator[Picture]:
    """The loss against what the variants cost, where that differs."""
    for name, words in COSTS.items():
        sizes = {variant.label: size(variant.finished[0], name) for variant in sweep.variants if variant.label in found}
        sizes = {label: known for label, known in sizes.items() if known}
        if not sizes or max(sizes.values()) < DIFFERENT * min(sizes.values()):
            continue
        styles = {label: style | {"ls": "none"} for label, style in line_styles(sweep).items() if label in sizes}
        axes = new_figure(4.0).subplots()
        for label, style in styles.items():
            draw_point(axes, sizes[label], found[label], style)
        axes.set(xlabel=words, ylabel=f"{which} {LOSS}")
        engineering(axes, max(sizes.values()) > WIDE * min(sizes.values()))
        add_legend(axes.figure, styles)
        title = f"{which.capitalize()} validation loss against {words}"
        caption = "Means over finished seeds with their 95 % intervals (one seed: no interval)."
        yield saved(axes.figure, folder / f"{which}_loss_{name}.png", title, caption)


def seeds(variant: Variant, which: str) -> list[float]:
    return [
        run.summary[f"{which}_val_loss"] for run in variant.finished if run.summary.get(f"{which}_val_loss") is not None
    ]


def draw_point(
    axes, at: float, interval: Interval, style: dict, dots: Sequence[float] = (), *, upright: bool = True
) -> None:
    """A mean, its interval if it has one, and dots for its seeds."""
    bar = None if interval.low is None else [[interval.mean - interval.low], [interval.high - interval.mean]]
    place = {"x": at, "y": interval.mean, "yerr": bar} if upright else {"x": interval.mean, "y": at, "xerr": bar}
    axes.errorbar(**place, **style | {"ls": "none"}, ms=5.5, capsize=3, lw=1.4)
    line = [at] * len(dots)
    axes.plot(*((line, dots) if upright else (dots, line)), "o", ms=2.5, color="0.75", mec="0.2", mew=0.5, zorder=3)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def positions(values: Sequence[object]) -> dict[str, float]:
    """Where each value stands on an axis, by its text: numbers in order, by their logarithm where they are powers of two or span much;
    others side by side in the order of the sweep.
    """
    if not all(map(is_number, values)):
        return {word: float(i) for i, word in enumerate(dict.fromkeys(map(text_of, values)))}
    ordered = sorted(values)
    log = ordered[0] > 0 and (
        all(math.log2(value).is_integer() for value in ordered) or ordered[-1] > WIDE * ordered[0]
    )
    return {text_of(value): math.log2(value) if log else float(value) for value in ordered}


def plain(words: str) -> str:
    """Words that matplotlib shows as they stand: no formula between dollars."""
    return words.replace("$", r"\$")


def line_styles(sweep: Sweep) -> dict[str, dict]:
    """Colour, line and marker of each variant, by label; many values of one number become a colour scale in their order."""
    variants, n = list(sweep.variants), len(COLOURS)
    if (
        len(variants) > n
        and len(sweep.keys) == 1
        and all(is_number(variant.values[sweep.keys[0]]) for variant in variants)
    ):
        variants.sort(key=lambda variant: variant.values[sweep.keys[0]])
        return {
            variant.label: {"color": colour, "marker": "o"}
            for variant, colour in zip(variants, sequential(len(variants)))
        }
    marks = [MARKS[i // n % len(MARKS)] for i in range(len(variants))]
    return {
        variant.label: {"color": COLOURS[i % n], "ls": marks[i][0], "marker": marks[i][1]}
        for i, variant in enumerate(variants)
    }


def sequential(n: int) -> list:
    """n colours from dark to light, but for the lightest, which is not seen on white."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / (n - 1)) for i in range(n)]


def new_figure(height: float):
    """Narrow, in inches: a phone shows all of it with letters that can still be read."""
    from matplotlib.figure import Figure  # no pyplot: that would look for a display

    return Figure(figsize=(6.4, height), layout="constrained")


def add_legend(figure, styles: dict[str, dict]) -> None:
    """A sample of each line with its label, on rows of their own below the axes."""
    from matplotlib.lines import Line2D

    if styles:
        columns = max(1, min(len(styles), 84 // (max(map(len, styles)) + 8)))
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(styles) / columns))
        samples = [Line2D([], [], ms=4, **style) for style in styles.values()]
        figure.legend(
            samples,
            [plain(label) for label in styles],
            loc="outside lower center",
            ncols=columns,
            fontsize=9,
            frameon=False,
        )


def engineering(axes, wide: bool) -> None:
    """1.5 M instead of 1500000, and a logarithmic axis with more than its decades where the numbers span much."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
