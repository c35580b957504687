"""The parts of a sweep's report, and numbers and lists in words; the writer of each format escapes the texts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tril.model.intervals import Interval
from tril.scripts.ablation.plot_style import Picture


@dataclass(frozen=True)
class Table:
    """Header and rows; `words` are the text columns, aligned to the left."""

    header: Sequence[str]
    rows: list[list[str]]
    words: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Section:
    """A title, paragraphs before and after a table, and pictures."""

    title: str
    before: Sequence[str] = ()
    table: Table | None = None
    after: Sequence[str] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Report:
    """The whole report; `answer` is the comparison in one sentence."""

    title: str
    answer: str
    warnings: list[str]
    sections: list[Section]


def spread(interval: Interval | None, *, sign: str = "", alone: str = "") -> str:
    """2.8516 ± 0.0123, with more digits for a narrower interval; `alone` follows a mean without an interval."""
    if interval is None:
        return "-"
    if not math.isfinite(interval.mean):
        return "diverged"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{sign}.4f}{alone}"
    half = (interval.high - interval.low) / 2
    digits = min(6, max(4, 1 - math.floor(math.log10(half)))) if half > 0 else 4
    return f"{interval.mean:{sign}.{digits}f} ± {half:.{digits}f}"


def p_value(p: float | None) -> str:
    return "-" if p is None else "below 0.0001" if p < 1e-4 else f"{p:.2g}"


def named(label: str) -> str:
    """A label as an item of a list: in parentheses if it contains commas."""
    return f"({label})" if ", " in label else label


def listed(values: Iterable[object]) -> str:
    """The distinct values, separated by commas."""
    return ", ".join(dict.fromkeys(map(str, values)))
