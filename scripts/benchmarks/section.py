"""What every part of the benchmark receives, and what it returns.

A part is a function `run(bench)` that returns or yields sections. It raises `UserError` for a setting that it cannot
use, before it times anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.scripts.benchmarks.bench_config import BenchConfig
from tril.scripts.benchmarks.bench_plot import Plot
from tril.scripts.common.run_config import RunConfig

if TYPE_CHECKING:
    from tril.model.training.hardware import Hardware

Samples = Mapping[str, Sequence[float]]  # the values of every repetition, by name


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
class Section:
    """One table of the result.

    Attributes:
        name: the part, as in `what`.
        title: the heading.
        rows: the lines of the table, all with the same keys. Values are words, unrounded numbers, or None for an empty
            field; a key carries the unit, such as "ms per step (p50)".
        samples: the values of every repetition that went into the rows.
        notes: how it was measured, one sentence each.
        plot: its panel of bench.png; None: it has none.
    """

    name: str
    title: str
    rows: Sequence[Mapping[str, object]]
    samples: Samples
    notes: Sequence[str] = ()
    plot: Plot | None = None
