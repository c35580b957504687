"""What a fitted law predicts, compared with naive baselines, and how uncertain it is."""

import math
from collections.abc import Sequence

import numpy as np

from tril.scripts.ablation.goodness_of_fit import MeanSquare
from tril.scripts.ablation.scaling_law import RESTARTS, Law, Points, fit

MAX_NOISE = 3.0  # in log L, a factor of 20: far beyond any interval, and every number stays finite
MIN_HELD_OUT = {"sizes": 3, "token counts": 3, "points": 6}  # a curve with an offset needs three
FIT = "fit"
NAIVE = ("log-linear step", "nearest point", "mean exponents")
DECIMALS = 9  # of distances in ln N and ln D: those that differ by rounding are equal, on every machine


def naive_losses(points: Points, parameters: float, tokens: float) -> dict[str, float]:
    """Predicts L(N, D) without a law; all start from the nearest point, by the distance in ln N and ln D.

    "log-linear step": the line in ln N through that point and the next size with the same D, plus the same in ln D; NaN
    if there is no such point. "nearest point": its loss. "mean exponents": its loss times power laws without offset,
    whose exponents are means over the sweep.
    """
    logs = np.log([points.parameters, points.tokens])  # (2, n)
    start = closest(np.hypot(*(np.log([[parameters], [tokens]]) - logs)))
    step = growth = 0.0
    for x, other, target in ((*logs, math.log(parameters)), (*logs[::-1], math.log(tokens))):
        if round(target - x[start], DECIMALS):
            step += (target - x[start]) * local_slope(x, other, points.loss, start, target)
            growth += (target - x[start]) * mean_slope(x, other, np.log(points.loss))
    loss = float(points.loss[start])
    return dict(zip(NAIVE, (float(loss + step), loss, loss * math.exp(growth)), strict=True))


def closest(distances: np.ndarray) -> int:
    """Index of the smallest distance; of equal ones the first."""
    return int(np.argmin(np.round(distances, DECIMALS)))


def local_slope(x: np.ndarray, other: np.ndarray, y: np.ndarray, start: int, target: float) -> float:
    """dy / dx from `start` to the point nearest to x = `target` with the same value of `other`; NaN without one."""
    rows = np.flatnonzero((other == other[start]) & (x != x[start]))
    if not len(rows):
        return math.nan
    end = rows[closest(np.abs(target - x[rows]))]
    return float((y[end] - y[start]) / (x[end] - x[start]))


def mean_slope(x: np.ndarray, groups: np.ndarray, y: np.ndarray) -> float:
    """dy / dx by least squares with a level of its own for each value of `groups`; NaN if x varies within none."""
    same = groups[:, None] == groups  # (n, n)
    x, y = (values - same @ values / same.sum(1) for values in (x, y))
    squares = float((x**2).sum())
    return float((x * y).sum()) / squares if squares > 0 else math.nan


def predict_held_out(points: Points) -> dict[str, dict[str, np.ndarray]]:
    """Predicts points from the others: held out -> method -> (n,) losses, NaN if not held out or not predictable.

    "one point": each point from all others; "largest size" and "longest runs": all points of it from smaller sizes or
    shorter runs alone. The methods are the fit of the law, NaN if too few points remain, and the naive baselines.
    """
    folds = [("one point", np.arange(len(points)) == i) for i in range(len(points))]
    folds.append(("largest size", points.parameters == points.parameters.max()))
    folds.append(("longest runs", points.tokens == points.tokens.max()))
    predictions = {name: {method: np.full(len(points), math.nan) for method in (FIT, *NAIVE)} for name, _ in folds}
    for name, out in folds:
        others = points.take(~out)
        if not others.shortfall(MIN_HELD_OUT):
            law = fit(others, restarts=RESTARTS)
            predictions[name][FIT][out] = law.loss(points.parameters[out], points.tokens[out])
        for i in np.flatnonzero(out):
            for method, loss in naive_losses(others, points.parameters[i], points.tokens[i]).items():
                predictions[name][method][i] = loss
    return predictions


def prediction_errors(loss: np.ndarray, predicted: dict[str, np.ndarray]) -> dict[str, dict[str, float] | None]:
    """Errors of each method over the points that all methods predict; None for a method that predicts no point.

    Args:
        loss: (n,) measured.
        predicted: method -> (n,), NaN where there is no prediction.

    Returns:
        method -> points, mean, largest, bias (mean with sign, above 0 if too high), relative (mean of error / loss).
    """
    known = {method: np.isfinite(values) for method, values in predicted.items()}
    common = np.all([mask for mask in known.values() if mask.any()] or [np.zeros(len(loss), bool)], axis=0)
    errors = {}
    for method, values in predicted.items():
        error = (values - loss)[common]
        if not known[method].any() or not common.any():
            errors[method] = None
            continue
        size = np.abs(error)
        figures = {"mean": size, "largest": size.max(), "bias": error, "relative": size / loss[common]}
        errors[method] = {"points": int(common.sum())} | {name: float(np.mean(x)) for name, x in figures.items()}
    return errors


def resample(points: Points, law: Law, noise: MeanSquare, times: int, seed: int) -> list[Law]:
    """Fits `times` copies of the points whose losses are those of `law` with normal noise on their logarithms.

    Points drawn with replacement, the usual bootstrap, would often not determine a law: of six points only all six do.
    Few degrees of freedom leave the size of the noise uncertain, so it is drawn anew for each copy: for a linear law,
    the middle 95 % would be the interval of Student's t. The mean over seeds of a point has less noise than a run.
    """
    generator, fitted, laws = np.random.default_rng(seed), law.loss(points.parameters, points.tokens), []
    for _ in range(times):
        scale = np.sqrt(noise.value * noise.df / generator.chisquare(noise.df) / points.seeds)  # (n,)
        error = np.clip(scale * generator.normal(size=len(points)), -MAX_NOISE, MAX_NOISE)
        laws.append(fit(points.with_loss(fitted * np.exp(error)), restarts=RESTARTS))
    return laws


def percentile_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The percentiles of a bootstrap that enclose `confidence` of it."""
    low, high = np.quantile(np.asarray(values, float), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
