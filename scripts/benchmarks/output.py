"""The result as Markdown that reads well as plain text, as json, and as one picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tril.model.files import write_json, write_text
from tril.scripts.benchmarks.section import Section

SIGNIFICANT = 4  # digits in the tables; bench.json has all of them
PANEL = (5.6, 3.9)  # inches


def heading(about: Mapping[str, object]) -> str:
    """The machine, an item of a list each."""
    return "# Benchmark\n\n" + "\n".join(f"- {name}: {shown(value)}" for name, value in about.items())


def text(section: Section) -> str:
    """Heading, table and notes."""
    blocks = [f"## {section.title}", table(section.rows), "\n".join(f"- {note}" for note in section.notes)]
    return "\n\n".join(block for block in blocks if block)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown with aligned columns; those that hold numbers are aligned to the right."""
    names = list(rows[0])
    assert all(list(row) == names for row in rows), "rows of one table with different keys"
    right = [any(is_number(row[name]) for row in rows) for name in names]
    cells = [names] + [[shown(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        [cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(line, widths, right)] for line in cells
    ]
    lines.insert(1, ["-" * (width - 1) + ":" if r else "-" * width for width, r in zip(widths, right)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """As it stands in the text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value).replace("|", "\\|")
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{abs(value):.{SIGNIFICANT}g}")  # 999.96 is 1,000 and not 1,000.0
    return f"{value:,.{max(0, SIGNIFICANT - 1 - math.floor(math.log10(rounded)))}f}"


def write(
    folder: Path, about: Mapping[str, object], settings: Mapping[str, object], sections: Sequence[Section]
) -> None:
    """bench.md and bench.json."""
    write_text(folder / "bench.md", "\n\n".join([heading(about), *map(text, sections)]) + "\n")
    parts = [
        {key: getattr(section, key) for key in ("name", "title", "rows", "samples", "notes")} for section in sections
    ]
    write_json(folder / "bench.json", {"machine": about, "settings": settings, "sections": parts})


def plot(path: Path, about: Mapping[str, object], sections: Sequence[Section]) -> bool:
    """A panel for every section that draws; no file, and False, where none does."""
    from matplotlib.figure import Figure  # no pyplot: that would look for a display

    panels = [section.draw for section in sections if section.draw is not None]
    if not panels:
        return False
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.4), layout="constrained")
    figure.suptitle(f"{about['device']}, {about['precision']}, torch {about['torch']}, {about['date']}", fontsize=9)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, draw in zip(grid, panels):
        draw(axes)
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.remove()
    figure.savefig(path, dpi=130)
    return True
