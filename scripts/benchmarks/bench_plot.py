"""The panels of bench.png."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = Mapping[str, Mapping[Any, float]]  # {label: {x: y}}


@dataclass(frozen=True)
class Plot:
    """One line per label.

    Attributes:
        guides: further lines, in gray.
        log: both axes are logarithmic, so that a power is a straight line; otherwise y starts at 0.
    """

    lines: Lines
    xlabel: str
    ylabel: str
    guides: Lines = field(default_factory=dict)
    log: bool = False

    def draw(self, axes: "Axes", title: str) -> None:
        for name, points in self.lines.items():
            axes.plot(list(points), list(points.values()), "o-", ms=4, lw=1.3, label=name)
        for style, (name, points) in zip(("--", ":"), self.guides.items(), strict=False):
            axes.plot(list(points), list(points.values()), style, color="0.5", lw=1, label=name, zorder=0)
        axes.set(title=title, xlabel=self.xlabel, ylabel=self.ylabel)
        if self.log:
            axes.set_xscale("log")
            axes.set_yscale("log", base=2)
            ticks = sorted({x for points in self.lines.values() for x in points})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        else:
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.legend(fontsize=8)


def by_number(values: Mapping[str, Iterable[float]], unit: float = 1) -> Lines:
    """Lines through `values`, in multiples of `unit`, against 1, 2, ..."""
    return {name: dict(enumerate((unit * y for y in series), 1)) for name, series in values.items()}
