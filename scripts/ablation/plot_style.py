"""What the plots of sweeps share: figures, colors, lines and markers of variants, axes, legends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from tril.model.intervals import Interval, mean_interval
from tril.scripts.ablation.results import Sweep, Variant
from tril.scripts.ablation.run_files import Run

# distinguishable for color-blind readers
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c6d31")
MARKS = (("-", "o"), ("-.", "s"), (":", "^"), ((0, (8, 1)), "D"))  # line and marker of each cycle through the colors
WIDTH = 4.6  # inches of a figure
LOSS = "validation loss, nats per token"
SECTIONS = ("comparison", "losses", "curves", "costs", "tuning")  # of a report, with pictures
LOG_SCALE_RATIO = 8  # largest / smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class Picture:
    """A PNG in the report's folder, its title and caption, and the part of the report that shows it."""

    file: str
    title: str
    caption: str
    section: str  # one of SECTIONS


def estimate(variant: Variant, name: str) -> Interval | None:
    """Mean and interval over the finished seeds of an entry of summary.json; None if no summary has it."""
    values = variant.figures(name)
    return mean_interval(values) if values else None


def size(run: Run, name: str) -> float | None:
    """A figure that is known before training, as measured or else as planned; "training_flops" of a finished run."""
    summary = run.summary or {}
    if name == "training_flops":
        per_token, tokens = size(run, "flops_per_token"), summary.get("tokens")
        return None if per_token is None or tokens is None else per_token * tokens
    measured = summary.get(name)
    return run.planned.get(name) if measured is None else measured


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_wide(values: Sequence[float]) -> bool:
    """Whether the values need a logarithmic axis."""
    return max(values) > LOG_SCALE_RATIO * min(values)


def escape(text: str) -> str:
    """Text that matplotlib shows literally, without formulas between dollars."""
    return text.replace("$", r"\$")


def line_styles(sweep: Sweep) -> dict[str, dict]:
    """Label -> color, line and marker; the baseline's line is dashed.

    Many values of one number get a sequential color scale in their order.
    """
    variants, n = list(sweep.variants), len(COLORS)
    dashed = {sweep.baseline.label: {"ls": "--"}}
    if len(variants) > n and len(sweep.keys) == 1:
        key = sweep.keys[0]
        numbers = {variant.label: value for variant in variants if is_number(value := variant.values[key])}
        if len(numbers) == len(variants):
            labels = sorted(numbers, key=numbers.__getitem__)
            colors = sequential_colors(len(labels))
            pairs = zip(labels, colors, strict=True)
            return {label: {"color": color, "marker": "o"} | dashed.get(label, {}) for label, color in pairs}
    styles = {}
    for i, variant in enumerate(variants):
        line, marker = MARKS[i // n % len(MARKS)]
        styles[variant.label] = {"color": COLORS[i % n], "ls": line, "marker": marker} | dashed.get(variant.label, {})
    return styles


def sequential_colors(n: int) -> list:
    """n colors from dark to light, without the lightest, which is invisible on white."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / (n - 1)) for i in range(n)]


def new_figure(height: float):
    """A figure that is narrow enough to be legible on a phone, where it is 3.5 inches wide; `height` in inches."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    return Figure(figsize=(WIDTH, height), layout="constrained")


def add_legend(figure, styles: Mapping[str, dict]) -> None:
    """A sample of each line with its label, in additional rows below the axes."""
    from matplotlib.lines import Line2D

    if styles:
        columns = max(1, min(len(styles), 60 // (max(map(len, styles)) + 8)))
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(styles) / columns))
        lines = [Line2D([], [], ms=4, **style) for style in styles.values()]
        layout = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False}
        figure.legend(lines, [escape(label) for label in styles], **layout)


def engineering_axis(axes, wide: bool) -> None:
    """Labels the x axis 1.5 M instead of 1500000; `wide`: logarithmic, with labels between the decades."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
