"""Reports the results of a sweep or of a run:  python scripts/report.py dir=multirun/DATE/TIME

The sweep may still be running. Prints the differences from the baseline; report.md and report.html (one file) contain
everything; results.csv has a row for each variant and runs.csv one for each run, both with all digits. With
publish=FOLDER it writes the report for others, without report.html, and next to it runs.tar.xz, from which dir=FOLDER
computes the same report again. dir=outputs/DATE/TIME makes the page of a single run.
"""

from typing import Literal

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.runs import find_sweep
from tril.scripts.cli.command_line import CommandLine, Program
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import user_errors


@dataclass(frozen=True, config=strict_settings())
class ReportCommand:
    """What is compared, and where the report goes."""

    dir: str | None = setting(
        None,
        "a sweep's folder, latest (the newest below multirun/), a run, a folder of runs to compare, or a published "
        "report or its runs.tar.xz",
    )
    baseline: str | None = setting(
        None, "compare with this variant: model.n_heads=4, or several key=value with commas; null: the sweep's defaults"
    )
    which: Literal["final", "best"] | None = setting(
        None, "the validation loss to compare; null: final, or that of the published report"
    )
    margin: float | None = setting(
        None, "nats per token: variants whose difference is smaller are equal; null: none is", gt=0, allow_inf_nan=False
    )
    fit: Literal["scaling"] | None = setting(
        None, "scaling: fit a law of the loss by parameters and tokens (train -m +ablation=scaling); null: none"
    )
    out: str | None = setting(None, "folder for the report, its tables and pictures; null: the sweep's folder")
    publish: str | None = setting(None, "folder for a report to publish, with runs.tar.xz to compute it again")


@entry(Program("report", ReportCommand))
def main(line: CommandLine[ReportCommand]) -> None:
    settings = line.own
    with user_errors():
        if settings.dir is None:
            raise ValueError("dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest")
        if settings.out is not None and settings.publish is not None:
            raise ValueError(f"out={settings.out} excludes publish={settings.publish}; use one of them")
        source = find_sweep(settings.dir)
        from tril.scripts.experiments.published import write_report  # numpy and pandas take a moment to import

        print(write_report(source, vars(settings), settings.out, settings.publish), flush=True)


if __name__ == "__main__":
    main()
