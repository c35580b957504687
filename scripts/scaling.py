"""Fits a scaling law to a sweep:  python scripts/scaling.py dir=multirun/DATE/TIME

Fits L(N, D) = E + A / N^alpha + B / D^beta to the finished runs of a sweep (python train.py -m +ablation=scaling
seed=0,1), tests that form, compares its predictions of held-out runs with naive baselines, and extrapolates to larger
models. Writes scaling.md, scaling.json and scaling.png. With publish=FOLDER it writes scaling.md, scaling.png and
runs.tar.xz, from which dir=FOLDER computes the same page again.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, plain, setting, strict_settings
from tril.model.atomic_files import write_json, write_text
from tril.model.runs import find_sweep
from tril.scripts.ablation.sweep_files import SweepDir
from tril.scripts.cli.command_line import CommandLine, Program, entry
from tril.scripts.cli.errors import user_errors, writable

if TYPE_CHECKING:
    from tril.scripts.ablation.results import Sweep
    from tril.scripts.ablation.scaling_law import Points

PLACES = ("dir", "out", "publish")  # the other settings are published with the page

Numbers = list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
Size = Literal["parameters_without_embeddings", "parameters"]  # what counts as N


@dataclass(frozen=True, config=strict_settings("predict"))
class Predict:
    """What the law is extrapolated to."""

    parameters: Numbers = setting(
        (30_000_000, 85_000_000), "larger models, counted by `size`; 85 M: the blocks of base and of GPT-2 124M"
    )
    tokens: Numbers = setting((1, 10), "training tokens, in multiples of the longest run's")
    flops: Numbers = setting((1, 10, 100), "compute for the best split, in multiples of the largest run's")


@dataclass(frozen=True, config=strict_settings())
class ScalingCommand:
    """What is fitted, and what is predicted from it."""

    dir: SweepDir = setting(
        None,
        "a sweep's folder (python train.py -m +ablation=scaling), latest (the newest below multirun/), or a published "
        "page or its runs.tar.xz",
    )
    size: Size = setting(
        "parameters_without_embeddings",
        "what counts as N: this (Kaplan et al. 2020) or parameters (Hoffmann et al. 2022)",
    )
    predict: Predict = Predict()
    resamples: int = setting(
        500, "noisy copies of the points, for the intervals", ge=40
    )  # the interval leaves out one in forty at each end
    seed: int = setting(0, "of the resamples", ge=0)
    out: str | None = setting(None, "folder for scaling.md, scaling.json and scaling.png; null: the sweep's folder")
    publish: str | None = setting(
        None,
        "folder for scaling.md and scaling.png to publish, with runs.tar.xz, from which they can be computed again",
    )


@entry(Program("scaling", ScalingCommand))
def main(line: CommandLine[ScalingCommand]) -> None:
    settings = line.own
    with user_errors():
        if settings.out is not None and settings.publish is not None:
            raise ValueError(f"out={settings.out} excludes publish={settings.publish}; use one of them")
        source = find_sweep(settings.dir)
    # OpenBLAS would split matrices of five columns among threads, which wait for each other on a busy machine
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # numpy takes a moment to import: the errors above are reported before
    from tril.scripts.ablation.results import read_sweep
    from tril.scripts.ablation.scaling_law import points_of
    from tril.scripts.experiments.published import ARCHIVE, opened, pack

    with contextlib.ExitStack() as unpacked:
        with user_errors():
            sweep_folder, published = unpacked.enter_context(opened(source))
            settings = with_published(line, published)
            sweep = read_sweep(sweep_folder)
            points = points_of(sweep, settings.size)
            place = settings.publish or settings.out or (source.parent if source.is_file() else source)
            folder = writable(place, "out" if settings.publish is None else "publish")
            if settings.publish is not None:
                request = {key: value for key, value in asdict(settings).items() if key not in PLACES}
                pack(sweep, folder / ARCHIVE, request)
                # the page is computed from the archive, so that both are the same by construction
                sweep_folder, published = unpacked.enter_context(opened(folder / ARCHIVE))
                sweep = read_sweep(sweep_folder)
                points = points_of(sweep, settings.size)
        write_page(sweep, points, settings, folder, published=bool(published))


def write_page(sweep: "Sweep", points: "Points", settings: ScalingCommand, folder: Path, *, published: bool) -> None:
    """Fits the law, writes and prints the page.

    Args:
        published: without scaling.json, which repeats the page's figures.
    """
    from tril.scripts.ablation.goodness_of_fit import check_form
    from tril.scripts.ablation.scaling_findings import findings
    from tril.scripts.ablation.scaling_law import fit
    from tril.scripts.ablation.scaling_plots import plot_law
    from tril.scripts.ablation.scaling_predictions import resample
    from tril.scripts.ablation.templates import render

    law = fit(points)
    form = check_form(points, law)
    times = 0 if form.rejected else settings.resamples  # an interval would assume that the form is right
    more = f"and {times} noisy copies of them" if times else "without intervals: their form is rejected"
    print(f"fitting {len(points)} points, {more}", file=sys.stderr, flush=True)
    resamples = resample(points, law, form.noise, times, settings.seed)
    used = {key: value for key, value in asdict(settings).items() if key not in PLACES}
    found = findings(used, sweep, points, law, form, resamples, published=published)
    text = render("scaling.md.jinja", **found)
    files = ["scaling.md", "scaling.png"]
    if not published:
        write_json(folder / "scaling.json", found)
        files.insert(1, "scaling.json")
    write_text(folder / "scaling.md", text)
    plot_law(folder / "scaling.png", points, law, resamples)
    print(f"{text}\n{folder}: {', '.join(files)}", flush=True)


def with_published(line: CommandLine[ScalingCommand], published: Mapping[str, object]) -> ScalingCommand:
    """The typed settings, and for the others those of the published page where there is one."""
    typed = {each.key.partition(".")[0] for each in line.typed}
    others = {key: value for key, value in published.items() if key in ScalingCommand.__dataclass_fields__}
    return build(ScalingCommand, plain(line.own) | {key: x for key, x in others.items() if key not in typed})


if __name__ == "__main__":
    main()
