"""All results about a scaling law, unrounded, for scaling.json and the template of scaling.md."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from tril.scripts.ablation.goodness_of_fit import ALPHA, FormTests, check_form
from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.scaling_law import MIN_LAW, PARAMETERS, Law, Points, fit, points_of
from tril.scripts.ablation.scaling_predictions import (
    FIT,
    NAIVE,
    naive_losses,
    percentile_interval,
    predict_held_out,
    prediction_errors,
)

SIZES = ("parameters_without_embeddings", "parameters")  # what can count as N
EXTRAPOLATIONS = ("largest size", "longest runs")  # held out; a law must predict both better than the naive baselines
BETTER = 0.9  # an error is smaller if it is at most this share of the other; errors of few points vary by a tenth

Errors = dict[str, dict[str, dict[str, float] | None]]  # held out -> method -> error


def findings(
    settings: dict,
    sweep: Sweep,
    points: Points,
    law: Law,
    form: FormTests,
    resamples: Sequence[Law],
    *,
    published: bool = False,
) -> dict:
    """All results. Losses are in nats per token.

    Args:
        settings: of configs/scaling.yaml, with lists below "predict".
        sweep: which the points are from.
        points: n points.
        law: fitted to them.
        form: the tests of its form.
        resamples: for the intervals, which are None without them.
        published: the page lies next to the archive of its runs.
    """
    per_bpb = math.log(2) * sweep.summaries[0]["val_bytes_per_token"]
    held_out = predict_held_out(points)
    errors = {name: prediction_errors(points.loss, predicted) for name, predicted in held_out.items()}
    longest, flops = points.tokens.max(), (6 * points.parameters * points.tokens).max()
    diverged = [v.label for v in sweep.variants if v.finished and v.label not in points.labels]

    def predicted(of: Callable[[Law], float]) -> dict:
        low, high = percentile_interval([of(each) for each in resamples]) if resamples else (None, None)
        return {"value": float(of(law)), "low": low, "high": high}

    def loss_at(n: float, d: float) -> dict:
        losses = {"loss": predicted(lambda each: each.loss(n, d)), "naive": naive_losses(points, n, d)}
        return {"parameters": n, "tokens": float(d)} | losses

    predict = settings["predict"]
    at_bounds = sum(bool(each.bounds) for each in resamples) / len(resamples) if resamples else 0.0
    return {
        "sweep": str(sweep.folder),
        "published": published,
        "commands": [stage["command"] for stage in (sweep.index or {}).get("stages", ())],
        "settings": settings,
        "shortcomings": shortcomings(points, law, form, errors),
        "unfinished": [f"{run.folder.name} ({run.state})" for run in sweep.runs if run.state != "finished"],
        "diverged": [f"{label} (its loss is not finite)" for label in diverged],
        "alpha": ALPHA,
        "nats_per_bpb": per_bpb,
        "points": point_rows(points, law, held_out["one point"][FIT], per_bpb),
        "law": {name: predicted(lambda each, name=name: getattr(each, name)) for name in PARAMETERS},
        "bounds": list(law.bounds),
        "resamples_at_bounds": at_bounds,
        "form": asdict(form) | {"rejected": form.rejected, "noise": asdict(form.noise)},
        "errors": errors,
        "rivals": {name: naive_rival(methods) for name, methods in errors.items()},
        "predictions": [loss_at(n, times * longest) for n in predict["parameters"] for times in predict["tokens"]],
        "optima": [best_split(points, float(times * flops), predicted) for times in predict["flops"]],
        "other_sizes": {
            size: brief(points, law, form, errors) if size == settings["size"] else law_by_size(sweep, size)
            for size in SIZES
        },
    }


def point_rows(points: Points, law: Law, from_others: np.ndarray, per_bpb: float) -> list[dict]:
    """One entry for each point; `from_others` (n,) are predictions of each from all others."""
    fitted = law.loss(points.parameters, points.tokens)
    columns = {"parameters": points.parameters, "tokens": points.tokens, "loss": points.loss}
    columns |= {"bpb": points.loss / per_bpb, "seeds": points.seeds, "spread": points.spread}
    columns |= {"fitted": fitted, "residual": points.loss - fitted, "one point": from_others}
    return [
        {"label": label, "losses": points.by_seed[i].tolist()} | {name: float(x[i]) for name, x in columns.items()}
        for i, label in enumerate(points.labels)
    ]


def shortcomings(points: Points, law: Law, form: FormTests, errors: Errors) -> list[str]:
    """Why the fit is an illustration; empty if it is a law within its points."""
    found = [f"the sweep has {' and '.join(few)}"] if (few := points.shortfall(MIN_LAW)) else []
    if law.bounds:
        found.append(f"{', '.join(law.bounds)} ended at a bound of the fit")
    if form.interaction and form.interaction.p < ALPHA:
        found.append(f"its residuals follow ln N x ln D (p = {form.interaction.p:.2g})")
    if form.lack_of_fit and form.lack_of_fit.p < ALPHA:
        found.append(f"it misses the points by more than the seeds differ (p = {form.lack_of_fit.p:.2g})")
    for name in EXTRAPOLATIONS:
        if rival := naive_rival(errors[name]):
            found.append(f"for the {name} it is no better than the {rival}")
    return found


def naive_rival(errors: dict[str, dict[str, float] | None]) -> str:
    """The best naive baseline, unless the error of the fit is smaller; "" if it is, or if there is nothing to compare.

    Args:
        errors: method -> error.
    """
    naive = {method: error["mean"] for method in NAIVE if (error := errors[method])}
    if not naive or not (fitted := errors[FIT]):
        return ""
    best = min(naive, key=naive.__getitem__)
    return "" if fitted["mean"] <= BETTER * naive[best] else best


def best_split(points: Points, flops: float, predicted: Callable[[Callable[[Law], float]], dict]) -> dict:
    """The split of the compute into N and D with the lowest loss of the law, and the naive losses there."""
    split = {
        "flops": flops,
        "parameters": predicted(lambda law: law.optimum(flops)[0]),
        "tokens": predicted(lambda law: law.optimum(flops)[1]),
        "tokens_per_parameter": predicted(lambda law: law.optimum(flops)[1] / law.optimum(flops)[0]),
        "loss": predicted(lambda law: law.loss(*law.optimum(flops))),
    }
    return split | {"naive": naive_losses(points, split["parameters"]["value"], split["tokens"]["value"])}


def law_by_size(sweep: Sweep, size: str) -> dict:
    """`brief` of the law with `size` as N."""
    points = points_of(sweep, size)
    law = fit(points)
    held_out = predict_held_out(points)
    errors = {name: prediction_errors(points.loss, predicted) for name, predicted in held_out.items()}
    return brief(points, law, check_form(points, law), errors)


def brief(points: Points, law: Law, form: FormTests, errors: Errors) -> dict:
    """What the ways to count N are compared by, without intervals."""
    n, d = law.optimum((6 * points.parameters * points.tokens).max())
    return {
        "E": law.E,
        "alpha": law.alpha,
        "beta": law.beta,
        "tokens_per_parameter": d / n,
        "errors": {name: methods[FIT] for name, methods in errors.items()},
        "interaction": asdict(form.interaction) if form.interaction else None,
    }
