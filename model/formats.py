"""Numbers, tables and texts as they are printed and read: durations, counts, Markdown, CSV, UTF-8 files."""

import csv
import io
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from tqdm import tqdm

SECONDS = {"s": 1, "m": 60, "h": 3600}
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def clock(seconds: float) -> str:
    """65 -> "01:05"; 3725 -> "1:02:05"; a day or more: "1.5 days"."""
    return tqdm.format_interval(seconds) if seconds < 86400 else f"{seconds / 86400:.1f} days"


def to_seconds(text: object) -> float:
    """ "90s", "60m" or "1.5h" in seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", str(text))
    if not match or float(match[1]) == 0:
        raise PydanticCustomError("time", "must be a time, such as 90s, 60m or 2h")  # after KEY=VALUE
    return float(match[1]) * SECONDS[match[2]]


Seconds = Annotated[float, BeforeValidator(to_seconds)]  # of a setting


def engineering(value: float) -> str:
    """1540000 -> "1.54 M"."""
    limit, unit = next(((limit, unit) for limit, unit in UNITS if value >= limit), (1, ""))
    return f"{value / limit:.3g} {unit}".rstrip()


def wrapped(text: str) -> str:
    """The text in lines of at most 120 columns, without a break in a word, a path or the row of a table."""
    fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if line.startswith("|") else fill(line) for line in text.split("\n"))


def figures(row: Mapping[str, Any], prefix: str) -> str:
    """Such as "0.8901 bits per byte, 1.2345 nats per token"."""
    return f"{row[f'{prefix}bpb']:.4f} bits per byte, {row[f'{prefix}loss']:.4f} nats per token"


def plural(n: int, noun: str) -> str:
    """1 -> "1 run", 2 -> "2 runs"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def markdown_table(lines: Sequence[Sequence[str]], text_columns: Collection[int] = (0,)) -> str:
    """A Markdown table whose source is aligned as well.

    Args:
        lines: the first one is the header.
        text_columns: columns that are aligned to the left; the others hold numbers.
    """
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    header, *rows = (
        [cell.ljust(widths[i]) if i in text_columns else cell.rjust(widths[i]) for i, cell in enumerate(line)]
        for line in lines
    )
    marks = ["-" * (len(cell) + 1) + ("-" if i in text_columns else ":") for i, cell in enumerate(header)]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(row)} |" for row in rows)])


def csv_text(rows: Iterable[Mapping[str, object]]) -> str:
    """CSV with the columns of all rows in the order of their first appearance."""
    rows, text = list(rows), io.StringIO(newline="")
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def shell_command(script: str, *settings: str) -> str:
    """How the user starts a script: `tril report dir=latest`.

    Args:
        settings: key=value; those with spaces or other characters of the shell are quoted.
    """
    return shlex.join(["tril", script, *settings])
