"""Reports the results of a sweep:  tril report dir=latest

The sweep may still be running. Prints the differences from the baseline; report.md contains everything, with pictures;
results.csv has a row for each variant and runs.csv one for each run, both with all digits. With candidate=VARIANT, the
exit status is 0 (better than the baseline), 1 (worse or equal), 3 (undecided) or 2 (wrong input).
"""

import sys

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.runs import SETTINGS, find_sweep
from tril.scripts.cli.app import Composed, command
from tril.scripts.cli.errors import printed_too, user_errors, writable


@dataclass(frozen=True, config=strict_settings())
class ReportCommand:
    """What is compared, and where the report goes."""

    dir: str = setting(
        "latest", "a sweep's folder, latest (the newest below multirun/), or a folder of runs to compare"
    )
    baseline: str | None = setting(
        None, "compare with this variant: model.n_heads=4, or several key=value with commas; null: the sweep's defaults"
    )
    candidate: str | None = setting(None, "the exit status judges this variant, named as the baseline is: 0, 1 or 3")
    margin: float | None = setting(
        None,
        "largest difference that counts as equal, in nats per token; null: no variant is called equal",
        gt=0,
        allow_inf_nan=False,
    )
    tune: str | None = setting(
        None,
        "a swept key: each variant keeps its best value on every fourth document; the other documents compare them",
    )
    out: str | None = setting(None, "folder for the report, its tables and pictures; null: the sweep's folder")


@command("report", ReportCommand)
def main(settings: ReportCommand, composed: Composed) -> None:
    with user_errors():
        folder = find_sweep(settings.dir)
        if (folder / SETTINGS).is_file():
            raise ValueError(f"dir={folder} is a single run; name a sweep, dir=multirun/NAME or dir=latest")
        from tril.scripts.experiments.report import read_report  # numpy and pandas take a moment to import

        report = read_report(folder, settings.baseline, settings.margin, settings.tune)
        status = 0 if settings.candidate is None else report.status(settings.candidate)
        to = writable(settings.out or folder, "out")
        with printed_too(report.shown()):
            files = report.write(to)
        print(f"\n{to}: {', '.join(files)}", flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
