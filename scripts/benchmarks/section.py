"""What every part of the benchmark gets, and what it gives back.

A part is a function run(bench) -> list[Section]. What the user got wrong it raises as `scripts.cli.UserError`, before it times anything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.scripts.common.run_config import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Bench:
    """
    plan       the checked settings: model, optim, data, hardware
    cfg        all settings as plain containers
    repeats    repetitions of everything that is compared
    warmup     steps, or calls, before timing begins in each repetition
    steps      timed ones in each repetition
    overrides  what was typed, key=value each, without the keys that train.py does not know: for the processes that a part starts
    folder     for files that a part needs; removed at the end
    """

    plan: Plan
    cfg: dict[str, Any]
    repeats: int
    warmup: int
    steps: int
    overrides: list[str]
    folder: Path

    @property
    def device(self) -> str:
        """cpu, cuda or mps"""
        return self.plan.hardware.accelerator


@dataclass(frozen=True)
class Section:
    """One table of the result.

    name     as in `what`
    title    its heading
    rows     the lines of the table, with the same keys in each; words and unrounded numbers, None where there is nothing to say.
             A key carries its unit: "ms per step (p50)"
    samples  every single repetition that went into the rows
    notes    how it was measured, one sentence each
    draw     draws its panel of bench.png, title and axis labels included; None: it has none
    """

    name: str
    title: str
    rows: Sequence[Mapping[str, object]]
    samples: Mapping[str, Sequence[float]]
    notes: Sequence[str] = ()
    draw: "Callable[[Axes], None] | None" = None
