"""Reports the results of a sweep:  python scripts/report.py dir=multirun/DATE/TIME

The sweep may still be running. All keys: configs/report.yaml. Prints the main table; report.md and report.html (one
file) contain everything; results.csv has a row for each variant and runs.csv one for each run, both with all digits.
"""

import base64
import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

from tril.model.atomic_files import write_text
from tril.model.runs import find_sweep
from tril.model.validation import strict_settings
from tril.scripts.ablation.sweep_dir import SweepDir
from tril.scripts.common.cli import build, entry, user_errors, writable
from tril.scripts.common.tables import markdown_table

if TYPE_CHECKING:
    from tril.scripts.ablation.report_parts import Report, Table
    from tril.scripts.ablation.results import Sweep
    from tril.scripts.ablation.statistics import Comparison

TEXT_KEYS = ("dir", "baseline", "out")


@dataclass(frozen=True, config=strict_settings())
class Settings:
    """The keys of configs/report.yaml."""

    dir: SweepDir
    baseline: str | None
    which: Literal["final", "best"]
    out: str | None


@entry("report", TEXT_KEYS)
def main(cfg) -> None:
    with user_errors():
        settings = build(Settings, cfg)
        sweep_folder = find_sweep(settings.dir)
    # numpy takes a moment to import: the errors above are reported before
    from tril.scripts.ablation.comparisons import compare_with_baseline
    from tril.scripts.ablation.figures import draw
    from tril.scripts.ablation.report import write_up
    from tril.scripts.ablation.report_sections import losses, read_configs
    from tril.scripts.ablation.results import read_sweep

    with user_errors():
        sweep = read_sweep(sweep_folder, settings.baseline)
        comparisons, configs = compare_with_baseline(sweep, settings.which), read_configs(sweep)
        folder = writable(settings.out or sweep_folder, "out")
    pictures = draw(sweep, settings.which, folder)
    report = write_up(sweep, settings.which, comparisons=comparisons, configs=configs, pictures=pictures)
    files = {
        "report.md": markdown(report),
        "report.html": html(report, folder),
        "results.csv": csv_text(results(sweep, comparisons)),
        "runs.csv": csv_text(run_rows(sweep)),
    }
    for name, text in files.items():
        write_text(folder / name, text.encode(errors="replace").decode())  # a log may contain bytes that are not text
    table, names = losses(sweep).table, ", ".join([*files, *(picture.file for picture in pictures)])
    assert table is not None
    print(f"{printable(report.answer)}\n\n{escaped_table(table)}\n\n{folder}: {names}", flush=True)


def html(report: "Report", folder: Path) -> str:
    """The report as one page that contains the pictures in `folder`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    files = [picture.file for section in report.sections for picture in section.pictures]
    images = {file: base64.b64encode((folder / file).read_bytes()).decode() for file in files}
    templates = FileSystemLoader(Path(__file__).parent / "ablation")
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("report.html").render(report=report, images=images)


def markdown(report: "Report") -> str:
    """The report as Markdown that refers to the pictures next to it."""
    parts = [f"# {escape(report.title)}", f"**{escape(report.answer)}**"]
    parts += [f"**Warning.** {escape(line)}" for line in report.warnings]
    for section in report.sections:
        parts += [f"## {escape(section.title)}", *map(escape, section.before)]
        if section.table:
            parts.append(escaped_table(section.table))
        parts += map(escape, section.after)
        for picture in section.pictures:
            title = escape(picture.title)
            parts += [f"### {title}", f"![{title}]({picture.file})", escape(picture.caption)]
    return "\n\n".join(parts) + "\n"


def escaped_table(table: "Table") -> str:
    """The table as Markdown."""
    return markdown_table([[escape(text) for text in line] for line in (table.header, *table.rows)], table.words)


def escape(text: str) -> str:
    """Text in one line without Markdown or HTML markup; an underscore within a word is not markup."""
    return re.sub(r"[\\`*|<>&\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(text))


def printable(text: str) -> str:
    """Text in one line without control characters for a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def results(sweep: "Sweep", comparisons: dict[str, "Comparison"]) -> Iterator[dict[str, object]]:
    """One row for each variant: the numbers of the report's tables."""
    from tril.scripts.ablation.plot_style import estimate
    from tril.scripts.ablation.report_sections import LOSSES, SIZES, SPEEDS, median_of, size_of

    for variant in sweep.variants:
        row = {"variant": variant.label, **variant.values, "baseline": variant is sweep.baseline}
        row |= {"seeds": len(variant.runs), "finished": len(variant.finished)}
        for name in LOSSES:
            row |= interval_columns(name, estimate(variant, name))
        row |= {name: size_of(variant, name) for name in SIZES} | {name: median_of(variant, name) for name in SPEEDS}
        if found := comparisons.get(variant.label):
            row |= {"common_seeds": found.difference.n} | interval_columns("difference", found.difference)
            row |= {"difference_unit": found.unit, "p_corrected": found.p, "verdict": found.verdict}
            row |= {"more_seeds": found.more_seeds, "remark": found.remark}
        yield row


def interval_columns(name: str, interval) -> dict[str, float | None]:
    """Mean and ends of an interval, which may be None, as columns."""
    ends = {"": "mean", "_low": "low", "_high": "high"}
    return {f"{name}{suffix}": getattr(interval, end, None) for suffix, end in ends.items()}


def run_rows(sweep: "Sweep") -> Iterator[dict[str, object]]:
    """One row for each run: its state and the numbers of its summary."""
    for variant in sweep.variants:
        for run in variant.runs:
            row = {"variant": variant.label, **variant.values, "seed": run.seed}
            row |= {"state": run.state, "message": run.message} | (run.summary or {}) | {"folder": str(run.folder)}
            row.pop("sample_with", None)  # a path on one machine
            yield row


def csv_text(rows: Iterable[dict[str, object]]) -> str:
    """CSV with the columns of all rows in the order of their first appearance."""
    rows, text = list(rows), io.StringIO(newline="")
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    main()
