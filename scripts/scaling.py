"""Fits a scaling law to a sweep:  python scripts/scaling.py dir=multirun/DATE/TIME

Fits L(N, D) = E + A / N^alpha + B / D^beta to the finished runs of a sweep (python train.py -m +ablation=scaling),
tests it on held-out runs and extrapolates to larger models. All keys: configs/scaling.yaml. Writes scaling.md,
scaling.json and scaling.png.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.model.atomic_files import write_json, write_text
from tril.model.runs import find_sweep
from tril.model.validation import strict_settings
from tril.scripts.ablation.sweep_files import SweepDir
from tril.scripts.common.cli import build, entry, plain, user_errors, writable

if TYPE_CHECKING:
    from tril.scripts.ablation.results import Sweep
    from tril.scripts.ablation.scaling_law import Law, Points

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
    from tril.scripts.ablation.results import read_sweep
    from tril.scripts.ablation.scaling_law import fit, points_of, resample
    from tril.scripts.ablation.scaling_plots import plot_law
    from tril.scripts.ablation.templates import render

    with user_errors():
        sweep = read_sweep(sweep_folder)
        points = points_of(sweep, settings.size)
        folder = writable(settings.out or sweep_folder, "out")
    print(f"fitting {len(points)} points, and {settings.resamples} noisy copies of them", file=sys.stderr, flush=True)
    law = fit(points)
    resamples = resample(points, law, settings.resamples, settings.seed)
    found = findings(settings, sweep, points, law, resamples)
    text = render("scaling.md.jinja", **found)
    write_json(folder / "scaling.json", found)
    write_text(folder / "scaling.md", text)
    plot_law(folder / "scaling.png", points, law, resamples)
    print(f"{text}\n{folder}: scaling.md, scaling.json, scaling.png", flush=True)


def read_settings(values: dict) -> Settings:
    """Raises ValueError for invalid settings."""
    predict = values["predict"] if isinstance(values["predict"], dict) else {}
    return build(Settings, values | {"predict": build(Predict, predict, "predict")})


def findings(settings: Settings, sweep: "Sweep", points: "Points", law: "Law", resamples: list["Law"]) -> dict:
    """All results, unrounded, for scaling.json. Losses in nats per token, intervals from the resamples."""
    from tril.scripts.ablation.scaling_law import PARAMETERS, percentile_interval, predict_held_out, prediction_errors

    per_bpb = math.log(2) * sweep.summaries[0]["val_bytes_per_token"]
    held_out, fitted = predict_held_out(points), law.loss(points.parameters, points.tokens)
    columns = {"parameters": points.parameters, "tokens": points.tokens, "loss": points.loss}
    columns |= {"bpb": points.loss / per_bpb, "seeds": points.seeds, "spread": points.spread}
    columns |= {"fitted": fitted, "residual": points.loss - fitted} | held_out
    rows = [
        {"label": label} | {name: float(values[i]) for name, values in columns.items()}
        for i, label in enumerate(points.labels)
    ]
    diverged = [v.label for v in sweep.variants if v.finished and v.label not in points.labels]
    longest, flops = points.tokens.max(), (6 * points.parameters * points.tokens).max()

    def predicted(of: Callable[["Law"], float]) -> dict:
        low, high = percentile_interval([of(each) for each in resamples])
        return {"value": float(of(law)), "low": low, "high": high}

    def loss_at(n: float, d: float) -> dict:
        return {"parameters": n, "tokens": float(d), "loss": predicted(lambda each: each.loss(n, d))}

    predict = settings.predict
    return {
        "sweep": str(sweep.folder),
        "settings": {key: value for key, value in asdict(settings).items() if key not in ("dir", "out")},
        "unfinished": [f"{run.folder.name} ({run.state})" for run in sweep.runs if run.state != "finished"],
        "diverged": [f"{label} (its loss is not finite)" for label in diverged],
        "nats_per_bpb": per_bpb,
        "points": rows,
        "law": {name: predicted(lambda each, name=name: getattr(each, name)) for name in PARAMETERS},
        "bounds": list(law.bounds),
        "resamples_at_bounds": sum(bool(each.bounds) for each in resamples) / len(resamples),
        "errors": {name: prediction_errors(points.loss, values) for name, values in held_out.items()},
        "predictions": [loss_at(n, times * longest) for n in predict.parameters for times in predict.tokens],
        "optima": [best_split(float(times * flops), predicted) for times in predict.flops],
        "other_sizes": {size: law_by_size(sweep, size) for size in get_args(Size)},
    }


def best_split(flops: float, predicted: Callable[[Callable[["Law"], float]], dict]) -> dict:
    """The split of the compute into N and D with the lowest predicted loss."""
    return {
        "flops": flops,
        "parameters": predicted(lambda law: law.optimum(flops)[0]),
        "tokens": predicted(lambda law: law.optimum(flops)[1]),
        "tokens_per_parameter": predicted(lambda law: law.optimum(flops)[1] / law.optimum(flops)[0]),
        "loss": predicted(lambda law: law.loss(*law.optimum(flops))),
    }


def law_by_size(sweep: "Sweep", size: str) -> dict:
    """The law with `size` as N, without intervals."""
    from tril.scripts.ablation.scaling_law import fit, points_of, predict_held_out, prediction_errors

    points = points_of(sweep, size)
    law = fit(points)
    n, d = law.optimum((6 * points.parameters * points.tokens).max())
    errors = {name: prediction_errors(points.loss, values) for name, values in predict_held_out(points).items()}
    return {"E": law.E, "alpha": law.alpha, "beta": law.beta, "tokens_per_parameter": d / n, "errors": errors}


if __name__ == "__main__":
    main()
