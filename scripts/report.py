"""What a sweep says:  python scripts/report.py dir=multirun/DATE/TIME

Also of a sweep that is still running, of the newest one (dir=latest), against another baseline (baseline=model.n_heads=4). All keys:
configs/report.yaml. The main table goes to stdout; report.md and report.html (one file) say it all; results.csv has a row for each variant,
cells.csv one for each run, both with all digits.
"""

import base64
import csv
import re
from collections.abc import Iterable
from pathlib import Path

from tril.model.runs import find_sweep
from tril.scripts.common.cli import entry, plain, user_errors, writable
from tril.scripts.common.tables import aligned

TEXTS = ("dir", "baseline", "out")  # keys whose value is text as it was typed


@entry("report", TEXTS)
def main(cfg) -> None:
    cfg = plain(cfg)
    with user_errors():
        check(cfg)
        place = find_sweep(cfg["dir"])
    from tril.scripts.ablation.figures import draw
    from tril.scripts.ablation.report import (  # importing numpy takes a moment: what is wrong above is said at once
        losses,
        read_configs,
        write_up,
    )
    from tril.scripts.ablation.results import compare_with_baseline, read_sweep

    with user_errors():
        sweep = read_sweep(place, cfg["baseline"])
        comparisons, configs = compare_with_baseline(sweep, cfg["which"]), read_configs(sweep)
        folder = writable(cfg["out"] or place, "out")
    pictures = draw(sweep, cfg["which"], folder)
    report = write_up(sweep, cfg["which"], comparisons=comparisons, configs=configs, pictures=pictures)
    write(folder, report, pictures)
    write_csv(folder / "results.csv", results(sweep, comparisons))
    write_csv(folder / "cells.csv", cells(sweep))
    files = ["report.md", "report.html", "results.csv", "cells.csv", *(picture.file for picture in pictures)]
    print(
        f"{printable(report.answer)}\n\n{markdown_table(losses(sweep).table)}\n\n{folder}: {', '.join(files)}",
        flush=True,
    )


def check(cfg: dict) -> None:
    """Raises ValueError for values that no sweep could make right."""
    if cfg["dir"] is None:
        raise ValueError("dir is missing; give the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest")
    if cfg["which"] not in ("final", "best"):
        raise ValueError(f"which={cfg['which']} must be final or best")


def write(folder: Path, report, pictures: list) -> None:
    """report.md, and report.html with the pictures in it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from tril.scripts.ablation.report import TEMPLATES

    images = {picture.file: base64.b64encode((folder / picture.file).read_bytes()).decode() for picture in pictures}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html").render(report=report, images=images)
    for name, text in (("report.md", markdown(report)), ("report.html", page)):
        (folder / name).write_text(text, encoding="utf-8", errors="replace")  # a log may hold what is no text


def markdown(report) -> str:
    """The report as Markdown, its pictures beside it."""
    parts = [
        f"# {escape(report.title)}",
        f"**{escape(report.answer)}**",
        *(f"**Warning.** {escape(line)}" for line in report.warnings),
    ]
    for section in report.sections:
        parts += [f"## {escape(section.title)}", *map(escape, section.before)]
        if section.table:
            parts.append(markdown_table(section.table))
        parts += map(escape, section.after)
        for picture in section.pictures:
            parts += [
                f"### {escape(picture.title)}",
                f"![{escape(picture.title)}]({picture.file})",
                escape(picture.caption),
            ]
    return "\n\n".join(parts) + "\n"


def markdown_table(table) -> str:
    """A table that can also be read as it is."""
    lines = [[escape(cell) for cell in line] for line in (table.header, *table.rows)]
    return aligned(lines, table.words)


def escape(text: str) -> str:
    """Text as one line in which Markdown finds no mark and no HTML; an underscore within a word is none."""
    return re.sub(r"[\\`*|<>&\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(text))


def printable(text: str) -> str:
    """On one line, and without what would steer a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def results(sweep, comparisons: dict) -> Iterable[dict[str, object]]:
    """A row for each variant: what the tables of the report show."""
    from tril.scripts.ablation.figures import estimate
    from tril.scripts.ablation.report import LOSSES, SIZES, SPEEDS, median_of, size_of

    for variant in sweep.variants:
        row = {"variant": variant.label, **variant.values, "baseline": variant is sweep.baseline}
        row |= {"seeds": len(variant.runs), "finished": len(variant.finished)}
        for name in LOSSES:
            found = estimate(variant, name)
            row |= {
                f"{name}{end}": getattr(found, side, None)
                for end, side in (("", "mean"), ("_low", "low"), ("_high", "high"))
            }
        row |= {name: size_of(variant, name) for name in SIZES} | {name: median_of(variant, name) for name in SPEEDS}
        found = comparisons.get(variant.label)
        if found:
            row |= {
                "common_seeds": found.difference.n,
                "difference": found.difference.mean,
                "difference_low": found.difference.low,
            }
            row |= {"difference_high": found.difference.high, "difference_unit": found.unit, "p_corrected": found.p}
            row |= {"verdict": found.verdict, "more_seeds": found.more_seeds, "remark": found.remark}
        yield row


def cells(sweep) -> Iterable[dict[str, object]]:
    """A row for each run: its state, and all figures of its summary."""
    for variant in sweep.variants:
        for run in variant.runs:
            row = {
                "variant": variant.label,
                **variant.values,
                "seed": run.seed,
                "state": run.state,
                "message": run.message,
            }
            figures = dict(run.summary or {})
            figures.pop("sample_with", None)  # it names a place on one machine
            yield row | figures | {"folder": str(run.folder)}


def write_csv(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """With the columns of all rows, in the order in which they first come."""
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
