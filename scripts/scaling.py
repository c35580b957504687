"""Fits a scaling law to a sweep:  python scripts/scaling.py dir=multirun/DATE/TIME

Fits L(N, D) = E + A / N^alpha + B / D^beta to the finished runs of a sweep (python train.py -m +ablation=scaling
seed=0,1), tests that form, compares its predictions of held-out runs with naive baselines, and extrapolates to larger
models. All keys: configs/scaling.yaml. Writes scaling.md, scaling.json and scaling.png.
"""

import os
import sys
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.model.atomic_files import write_json, write_text
from tril.model.runs import find_sweep
from tril.model.validation import strict_settings
from tril.scripts.ablation.sweep_files import SweepDir
from tril.scripts.common.cli import build, entry, plain, user_errors, writable

TEXT_KEYS = ("dir", "out")

Numbers = list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
Size = Literal["parameters_without_embeddings", "parameters"]  # what counts as N


@dataclass(frozen=True, config=strict_settings("predict"))
class Predict:
    """What the law is extrapolated to."""

    parameters: Numbers
    tokens: Numbers
    flops: Numbers


@dataclass(frozen=True, config=strict_settings())
class Settings:
    """The keys of configs/scaling.yaml."""

    dir: SweepDir
    size: Size
    predict: Predict
    resamples: Annotated[int, Field(ge=40)]  # the interval leaves out one in forty at each end
    seed: Annotated[int, Field(ge=0)]
    out: str | None


@entry("scaling", TEXT_KEYS)
def main(cfg) -> None:
    with user_errors():
        settings = read_settings(plain(cfg))
        sweep_folder = find_sweep(settings.dir)
    # OpenBLAS would split matrices of five columns among threads, which wait for each other on a busy machine
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # numpy takes a moment to import: the errors above are reported before
    from tril.scripts.ablation.goodness_of_fit import check_form
    from tril.scripts.ablation.results import read_sweep
    from tril.scripts.ablation.scaling_findings import findings
    from tril.scripts.ablation.scaling_law import fit, points_of
    from tril.scripts.ablation.scaling_plots import plot_law
    from tril.scripts.ablation.scaling_predictions import resample
    from tril.scripts.ablation.templates import render

    with user_errors():
        sweep = read_sweep(sweep_folder)
        points = points_of(sweep, settings.size)
        folder = writable(settings.out or sweep_folder, "out")
    law = fit(points)
    form = check_form(points, law)
    times = 0 if form.rejected else settings.resamples  # an interval would assume that the form is right
    more = f"and {times} noisy copies of them" if times else "without intervals: their form is rejected"
    print(f"fitting {len(points)} points, {more}", file=sys.stderr, flush=True)
    resamples = resample(points, law, form.noise, times, settings.seed)
    used = {key: value for key, value in asdict(settings).items() if key not in ("dir", "out")}
    found = findings(used, sweep, points, law, form, resamples)
    text = render("scaling.md.jinja", **found)
    write_json(folder / "scaling.json", found)
    write_text(folder / "scaling.md", text)
    plot_law(folder / "scaling.png", points, law, resamples)
    print(f"{text}\n{folder}: scaling.md, scaling.json, scaling.png", flush=True)


def read_settings(values: dict) -> Settings:
    """Raises ValueError for invalid settings."""
    predict = values.get("predict")
    predict = build(Predict, predict if isinstance(predict, dict) else {}, "predict")
    return build(Settings, values | {"predict": predict})


if __name__ == "__main__":
    main()
