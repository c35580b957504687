"""Reports the results of a sweep:  python scripts/report.py dir=multirun/DATE/TIME

The sweep may still be running. Prints the main table; report.md and report.html (one file) contain everything;
results.csv has a row for each variant and runs.csv one for each run, both with all digits. With publish=FOLDER it
writes the report for others, without report.html, and next to it runs.tar.xz, from which dir=FOLDER computes the same
report again.
"""

import base64
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.atomic_files import write_text
from tril.model.runs import find_sweep
from tril.scripts.ablation.sweep_files import SweepDir
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.formats import csv_text
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.scripts.ablation.results import Sweep
    from tril.scripts.ablation.statistics import Comparison

TEXT_KEYS = ("dir", "baseline", "out", "publish")


@dataclass(frozen=True, config=strict_settings())
class Settings:
    """The keys of configs/report.yaml."""

    dir: SweepDir
    baseline: str | None
    which: Literal["final", "best"] | None
    margin: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    out: str | None
    publish: str | None


@dataclass(frozen=True)
class Request:
    """What is compared: the settings of a report that are published with it."""

    baseline: str | None
    which: Literal["final", "best"]
    margin: float | None

    @classmethod
    def of(cls, settings: Settings, published: Mapping) -> "Request":
        """The settings that are not null, else those of the published report, else the defaults."""
        names = ("baseline", "which", "margin")
        chosen = {name: value for name in names if (value := getattr(settings, name)) is not None}
        return cls(**{"baseline": None, "which": "final", "margin": None} | dict(published) | chosen)


@entry("report", TEXT_KEYS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(Settings, cfg)
        if settings.out is not None and settings.publish is not None:
            raise ValueError(f"out={settings.out} excludes publish={settings.publish}; use one of them")
        source = find_sweep(settings.dir)
    # numpy takes a moment to import: the errors above are reported before
    from tril.scripts.ablation.published_sweep import ARCHIVE, opened, pack
    from tril.scripts.ablation.results import read_sweep

    with contextlib.ExitStack() as unpacked:
        with user_errors():
            sweep_folder, published = unpacked.enter_context(opened(source))
            request = Request.of(settings, published)
            sweep = read_sweep(sweep_folder, request.baseline)
            key = "out" if settings.publish is None else "publish"
            folder = writable(settings.publish or settings.out or (source.parent if source.is_file() else source), key)
            if settings.publish is not None:
                pack(sweep, folder / ARCHIVE, vars(request))
                # the report is computed from the archive, so that both are the same by construction
                sweep_folder, published = unpacked.enter_context(opened(folder / ARCHIVE))
                sweep = read_sweep(sweep_folder, request.baseline)
        write_report(sweep, request, folder, published=bool(published))


def write_report(sweep: "Sweep", request: Request, folder: Path, *, published: bool) -> None:
    """Writes and prints the report.

    Args:
        published: without report.html, which would hold the pictures once more.
    """
    from tril.scripts.ablation.comparisons import compare_with_baseline
    from tril.scripts.ablation.figures import draw
    from tril.scripts.ablation.report import write_up
    from tril.scripts.ablation.report_tables import read_configs
    from tril.scripts.ablation.templates import escaped_table, printable, render

    with user_errors():
        comparisons = compare_with_baseline(sweep, request.which, margin=request.margin)
        configs = read_configs(sweep)
    pictures = draw(sweep, request.which, folder, comparisons)
    files = [picture.file for picture in pictures]
    report = write_up(
        sweep, request.which, comparisons=comparisons, configs=configs, pictures=pictures, published=published
    )
    texts = {
        "report.md": render("report.md.jinja", **report),
        "results.csv": csv_text(results(sweep, comparisons)),
        "runs.csv": csv_text(run_rows(sweep)),
    }
    if not published:
        images = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in files}
        texts["report.html"] = render("report.html", **report, images=images)
    for name, text in texts.items():
        write_text(folder / name, text.encode(errors="replace").decode())  # a log may contain bytes that are not text
    table = escaped_table(report["losses"])
    print(f"{printable(report['answer'])}\n\n{table}\n\n{folder}: {', '.join([*texts, *files])}", flush=True)


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
            row |= {"more_seeds": found.more_seeds, "remark": found.remark, "method": found.method, "seed_df": found.df}
            row |= {"detectable": found.detectable, "stage": found.stage, "level": found.alpha}
            row |= {"clusters": found.n_clusters, "effective_clusters": found.effective_clusters}
            row |= {"margin": found.margin, "p_equal": found.p_equal}
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
            row |= {"state": run.state, "message": run.message} | (run.summary or {})
            row |= {"folder": run.folder.relative_to(sweep.folder).as_posix()}
            row.pop("sample_with", None)  # a path on one machine
            yield row


if __name__ == "__main__":
    main()
