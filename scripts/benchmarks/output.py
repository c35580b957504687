"""The result as Markdown, as JSON and as one picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tril.model.atomic_files import write_json, write_text
from tril.scripts.benchmarks.section import Section
from tril.scripts.cli.formats import markdown_table

SIGNIFICANT = 4  # digits in the tables; bench.json has all of them
PANEL = (5.6, 3.9)  # inches


def heading(about: Mapping[str, object]) -> str:
    """The machine, one list item per property."""
    return "# Benchmark\n\n" + "\n".join(f"- {name}: {shown(value)}" for name, value in about.items())


def text(section: Section) -> str:
    """Heading, table and notes in Markdown."""
    blocks = [f"## {section.title}", table(section.rows), "\n".join(f"- {note}" for note in section.notes)]
    return "\n\n".join(block for block in blocks if block)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown; columns that hold a number are aligned to the right."""
    names = list(rows[0])
    assert all(list(row) == names for row in rows), "rows of one table with different keys"
    words = [i for i, name in enumerate(names) if not any(isinstance(row[name], int | float) for row in rows)]
    return markdown_table([names, *([shown(row[name]) for name in names] for row in rows)], words)


def shown(value: object) -> str:
    """The text of one field."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value).replace("|", "\\|")
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{abs(value):.{SIGNIFICANT}g}")  # rounded first: 999.96 becomes 1,000, not 1,000.0
    return f"{value:,.{max(0, SIGNIFICANT - 1 - math.floor(math.log10(rounded)))}f}"


def write(folder: Path, about: dict[str, object], settings: dict[str, Any], sections: Sequence[Section]) -> None:
    """Writes bench.md and bench.json."""
    write_text(folder / "bench.md", "\n\n".join([heading(about), *map(text, sections)]) + "\n")
    parts = [{key: value for key, value in vars(section).items() if key != "plot"} for section in sections]
    write_json(folder / "bench.json", {"machine": about, "settings": settings, "sections": parts})


def plot(path: Path, about: Mapping[str, object], sections: Sequence[Section]) -> bool:
    """Draws the panels of all sections that have one. Returns False, and writes no file, if none has."""
    from matplotlib.figure import Figure  # pyplot would look for a display

    panels = [(section.plot, section.title) for section in sections if section.plot is not None]
    if not panels:
        return False
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.4), layout="constrained")
    figure.suptitle(f"{about['device']}, {about['precision']}, torch {about['torch']}, {about['date']}", fontsize=9)
    for number, (panel, title) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        panel.draw(axes, title)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    return True
