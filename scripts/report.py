"""Reports the results of a sweep:  python scripts/report.py dir=multirun/DATE/TIME

The sweep may still be running. Prints the differences from the baseline; report.md and report.html (one file) contain
everything; results.csv has a row for each variant and runs.csv one for each run, both with all digits. With
publish=FOLDER it writes the report for others, without report.html, and next to it runs.tar.xz, from which dir=FOLDER
computes the same report again.
"""

import contextlib
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.runs import find_sweep
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.typed import Typed

TEXT_KEYS = ("dir", "baseline", "out", "publish")


@dataclass(frozen=True, config=strict_settings())
class Settings:
    """The keys of configs/report.yaml."""

    dir: str | None
    baseline: str | None
    which: Literal["final", "best"] | None
    margin: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    out: str | None
    publish: str | None


@entry("report", TEXT_KEYS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(Settings, cfg)
        if settings.dir is None:
            raise ValueError("dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest")
        if settings.out is not None and settings.publish is not None:
            raise ValueError(f"out={settings.out} excludes publish={settings.publish}; use one of them")
        source = find_sweep(settings.dir)
    # numpy and pandas take a moment to import: the errors above are reported before
    from tril.scripts.experiments.losses import losses_of
    from tril.scripts.experiments.published import ARCHIVE, opened, pack
    from tril.scripts.experiments.report import Request, write_report
    from tril.scripts.experiments.sweep import read_sweep

    with contextlib.ExitStack() as unpacked:
        with user_errors():
            folder, published = unpacked.enter_context(opened(source))
            typed_ones = {name: getattr(settings, name) for name in vars(Request())}
            request = Request(**published | {name: value for name, value in typed_ones.items() if value is not None})
            sweep = read_sweep(folder, request.baseline)
            key = "out" if settings.publish is None else "publish"
            to = writable(settings.publish or settings.out or (source.parent if source.is_file() else source), key)
            if settings.publish is not None:
                pack(sweep, to / ARCHIVE, vars(request))
                # the report is computed from the archive, so that both are the same by construction
                folder, published = unpacked.enter_context(opened(to / ARCHIVE))
                sweep = read_sweep(folder, request.baseline)
            losses = losses_of(sweep, request.which)
        print(write_report(sweep, losses, request, to, published=bool(published)), flush=True)


if __name__ == "__main__":
    main()
