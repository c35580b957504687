"""What every part of the benchmark receives, and what it returns.

A part is a function `run(bench)` that returns or yields sections. It raises `UserError` for a setting that it cannot
use, before it times anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.scripts.benchmarks.bench_config import BenchConfig
from tril.scripts.cli.config import RunConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tril.model.training.hardware import Hardware

Samples = Mapping[str, Sequence[float]]  # the values of every repetition, by name
Lines = Mapping[str, Mapping[Any, float]]  # {label: {x: y}}


@dataclass(frozen=True)
class Bench:
    """The settings of one call of scripts/bench.py.

    Attributes:
        config: the settings of the benchmark itself.
        run_config: the checked settings of a run: model, optimizer, data, hardware.
        cfg: all settings as plain containers.
        overrides: the typed key=value that train.py accepts, for the processes that a part starts.
        folder: for temporary files; removed at the end.
    """

    config: BenchConfig
    run_config: RunConfig
    cfg: dict[str, Any]
    overrides: list[str]
    folder: Path

    @property
    def hardware(self) -> "Hardware":
        assert self.run_config.hardware is not None  # only settings for another machine have none
        return self.run_config.hardware

    @property
    def device(self) -> str:
        """cpu, cuda or mps."""
        return self.hardware.accelerator


@dataclass(frozen=True)
class Plot:
    """A panel of bench.png with one line per label.

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
            axes.loglog(base=2)
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


@dataclass(frozen=True)
class Section:
    """One table of the result.

    Attributes:
        name: the part, as in `what`.
        title: the heading.
        rows: the lines of the table, all with the same keys. Values are words, unrounded numbers, or None for an empty
            field; a key carries the unit, such as "ms per step (p50)".
        samples: the values of every repetition that went into the rows.
        notes: how it was measured, one sentence each.
        plot: None: it has none.
    """

    name: str
    title: str
    rows: Sequence[Mapping[str, object]]
    samples: Samples
    notes: Sequence[str] = ()
    plot: Plot | None = None
