"""Reports the results of a sweep:  python scripts/report.py dir=multirun/DATE/TIME

The sweep may still be running. All keys: configs/report.yaml. Prints the main table; report.md and report.html (one
file) contain everything; results.csv has a row for each variant and runs.csv one for each run, both with all digits.
"""

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

from tril.model.atomic_files import write_text
from tril.model.runs import find_sweep
from tril.model.validation import strict_settings
from tril.scripts.ablation.sweep_files import SweepDir
from tril.scripts.common.cli import build, entry, user_errors, writable
from tril.scripts.common.tables import csv_text

if TYPE_CHECKING:
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
    from tril.scripts.ablation.report_tables import read_configs
    from tril.scripts.ablation.results import read_sweep
    from tril.scripts.ablation.templates import escaped_table, printable, render

    with user_errors():
        sweep = read_sweep(sweep_folder, settings.baseline)
        comparisons, configs = compare_with_baseline(sweep, settings.which), read_configs(sweep)
        folder = writable(settings.out or sweep_folder, "out")
    pictures = draw(sweep, settings.which, folder)
    report = write_up(sweep, settings.which, comparisons=comparisons, configs=configs, pictures=pictures)
    images = {picture.file: base64.b64encode((folder / picture.file).read_bytes()).decode() for picture in pictures}
    files = {
        "report.md": render("report.md.jinja", **report),
        "report.html": render("report.html", **report, images=images),
        "results.csv": csv_text(results(sweep, comparisons)),
        "runs.csv": csv_text(run_rows(sweep)),
    }
    for name, text in files.items():
        write_text(folder / name, text.encode(errors="replace").decode())  # a log may contain bytes that are not text
    table = escaped_table(report["losses"])
    print(f"{printable(report['answer'])}\n\n{table}\n\n{folder}: {', '.join([*files, *images])}", flush=True)


def results(sweep: "Sweep", comparisons: dict[str, "Comparison"]) -> Iterator[dict[str, object]]:
    """One row for each variant: the numbers of the report's tables."""
    from tril.scripts.ablation.plot_style import estimate
    from tril.scripts.ablation.report_tables import LOSSES, SIZES, SPEEDS, median_of, size_of

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


if __name__ == "__main__":
    main()
