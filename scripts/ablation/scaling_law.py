"""How the loss falls with parameters and tokens: L(N, D) = E + A / N^alpha + B / D^beta, fitted to the finished cells of a sweep.

N parameters, D training tokens, L nats per token. The form and the way it is fitted (Huber loss on log L, from a grid of starts) are
those of Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, section 3.3 and appendix D.3; Besiroglu et al. 2024,
https://arxiv.org/abs/2404.10102, show what goes wrong in it: an optimizer that stops early, and intervals that are too narrow.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tril.scripts.ablation.results import Sweep

DELTA = 1e-3  # Hoffmann et al.: relative errors beyond it count by their size and no longer by their square
EXPONENTS = (0.01, 2.0)  # bounds of alpha and beta; Hoffmann et al. start from 0 to 2
TERMS = (
    1e-3,
    100.0,
)  # bounds in nats of E, and of the other two terms in the middle of the data; the lower one is as good as 0
STARTS = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2)  # of alpha and of beta, in all pairs
RESTARTS = 4  # of the starts, the best: where many laws are fitted
MOST = 1000  # evaluations from each start: where E ends at its bound, a hundred are too few
FREE = 5  # parameters of the law
MOST_NOISE = 3.0  # in log L, a factor of 20: far beyond any interval, and every number stays finite
NEEDED = {"sizes": 4, "token counts": 3, "cells": 6}  # five parameters of the law, and a cell to err on
IDENTIFIED = {
    "sizes": 3,
    "token counts": 3,
    "cells": 6,
}  # the same, where cells are left out: a curve with an offset needs three points


@dataclass(frozen=True)
class Cells:
    """The variants of a sweep that have finished, each a point of the law; n of them, in order of size and tokens.

    parameters, tokens, loss  (n,) N, D, and the mean over seeds of the final validation loss in nats per token
    seeds, spread             (n,) how many seeds, and their standard deviation; NaN for one
    """

    labels: tuple[str, ...]
    parameters: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    seeds: np.ndarray
    spread: np.ndarray

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows) -> "Cells":
        """Those of a mask (n,) or of indices, which may come more than once."""
        rows = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows)
        arrays = (getattr(self, name)[rows] for name in ("parameters", "tokens", "loss", "seeds", "spread"))
        return Cells(tuple(self.labels[row] for row in rows), *arrays)

    def lacking(self, needed: dict[str, int]) -> str:
        """What they are too few of; empty where they are enough."""
        distinct = {
            "sizes": self.parameters,
            "token counts": self.tokens,
            "cells": np.stack([self.parameters, self.tokens], 1),
        }
        counts = {name: len(np.unique(values, axis=0)) for name, values in distinct.items()}
        return ", ".join(
            f"{counts[name]} {name} of at least {least}" for name, least in needed.items() if counts[name] < least
        )


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats per token.

    bounds  which of its parameters ended at the edge of what was allowed: the data do not determine them
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    bounds: tuple[str, ...] = ()

    def loss(self, parameters, tokens):
        """Nats per token; arrays broadcast."""
        return self.E + self.A * np.power(parameters, -self.alpha) + self.B * np.power(tokens, -self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """N and D of least loss at 6 N D = `flops`: Hoffmann et al., equation 4."""
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        product = flops / 6
        return ratio * product ** (self.beta / (self.alpha + self.beta)), product ** (
            self.alpha / (self.alpha + self.beta)
        ) / ratio


def cells_of(sweep: Sweep, size: str) -> Cells:
    """The finished variants. `size`: the entry of summary.json that counts as N.

    Raises ValueError where they are not of one text and tokenizer, where two cannot be told apart by N and D, or where they are too few.
    """
    finished = [
        (variant.label, [run.summary for run in variant.finished]) for variant in sweep.variants if variant.finished
    ]
    usable = [
        (label, found) for label, found in finished if all(math.isfinite(each["final_val_loss"]) for each in found)
    ]
    if len({each.get("data_fingerprint") for _, found in usable for each in found}) > 1:
        raise ValueError(
            f"{sweep.folder} has cells of several texts or tokenizers, whose losses do not compare; sweep them one by one"
        )
    rows: dict[tuple, tuple] = {}  # by N and D
    for label, found in usable:
        place, losses = (found[0][size], found[0]["tokens"]), [each["final_val_loss"] for each in found]
        if place in rows:
            raise ValueError(
                f"{rows[place][-1]} and {label} have the same parameters and tokens; fit a law to a sweep of one recipe"
            )
        rows[place] = (
            *place,
            np.mean(losses),
            len(losses),
            np.std(losses, ddof=1) if len(losses) > 1 else math.nan,
            label,
        )
    *columns, labels = zip(*(rows[place] for place in sorted(rows))) if rows else ((),) * 6
    cells = Cells(tuple(labels), *(np.array(column, float) for column in columns))
    if lacking := cells.lacking(NEEDED):
        raise ValueError(
            f"{sweep.folder} has too little that is finished, {lacking}; train more with python train.py -m +ablation=scaling"
        )
    return cells


def residuals(theta: np.ndarray, n: np.ndarray, d: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """log L by the law less that of the cells, (n,).

    theta  log E, the logarithms of the other two terms where n and d are 0, alpha, beta
    n, d   (n,) logarithms of N and D, from the middle of the data
    """
    return np.logaddexp.reduce(terms(theta, n, d)) - log_loss


def slopes(theta: np.ndarray, n: np.ndarray, d: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """The derivatives of `residuals` by theta, (n, 5)."""
    logs = terms(theta, n, d)
    shares = np.exp(logs - np.logaddexp.reduce(logs))  # (3, n) of each term in the loss
    return np.stack([*shares, -shares[1] * n, -shares[2] * d], 1)


def terms(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The logarithms of E, A / N^alpha and B / D^beta: (3, n)."""
    return np.stack([np.full_like(n, theta[0]), theta[1] - theta[3] * n, theta[2] - theta[4] * d])


def fit(cells: Cells, *, restarts: int | None = None) -> Law:
    """The law with the least Huber loss. restarts: how many of the starts are followed to their end, the best ones; None: all."""
    from scipy.optimize import least_squares
    from scipy.special import huber

    middle = np.log(cells.parameters).mean(), np.log(cells.tokens).mean()
    n, d = np.log(cells.parameters) - middle[0], np.log(cells.tokens) - middle[1]
    data = n, d, np.log(cells.loss)
    limits = np.array([np.log(TERMS)] * 3 + [EXPONENTS] * 2)  # (5, 2)
    begin = sorted(starts(n, d, cells.loss), key=lambda theta: huber(DELTA, residuals(theta, *data)).sum())[:restarts]
    options = {
        "jac": slopes,
        "args": data,
        "bounds": limits.T,
        "loss": "huber",
        "f_scale": DELTA,
        "x_scale": "jac",
        "max_nfev": MOST,
    }
    ends = [least_squares(residuals, theta, **options, ftol=1e-12, xtol=1e-12, gtol=1e-15) for theta in begin]
    theta = min(ends, key=lambda end: end.cost).x
    edge = [
        name
        for name, value, both in zip(("E", "A", "B", "alpha", "beta"), theta, limits)
        if np.isclose(value, both, atol=1e-4).any()
    ]
    e, a, b, alpha, beta = theta.tolist()
    return Law(math.exp(e), math.exp(a + alpha * middle[0]), math.exp(b + beta * middle[1]), alpha, beta, tuple(edge))


def starts(n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> Iterator[np.ndarray]:
    """One for every pair of exponents: with those given, the law is linear in E, A and B, which least squares find."""
    from scipy.optimize import nnls

    for alpha, beta in itertools.product(STARTS, STARTS):
        terms, _ = nnls(np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], 1), loss)
        yield np.array([*np.log(np.clip(terms, 2 * TERMS[0], TERMS[1] / 2)), alpha, beta])


def resampled(cells: Cells, law: Law, times: int, seed: int) -> list[Law]:
    """The laws of `times` copies of the cells whose losses are those of `law` with normal noise on their logarithms.

    Cells drawn with replacement, the usual bootstrap, would too often not determine a law, and of six cells only the very same six do.
    The noise has the size of the residuals. So few of them leave that uncertain, so it is drawn anew for each copy: were the law
    linear, the middle 95 % would be the interval of Student's t with n - FREE degrees of freedom.
    """
    draw, fitted = np.random.default_rng(seed), law.loss(cells.parameters, cells.tokens)
    squares, laws = (np.log(cells.loss / fitted) ** 2).sum(), []
    for _ in range(times):
        noise = np.sqrt(squares / draw.chisquare(len(cells) - FREE)) * draw.normal(size=len(cells))
        copy = replace(cells, loss=fitted * np.exp(np.clip(noise, -MOST_NOISE, MOST_NOISE)))
        laws.append(fit(copy, restarts=RESTARTS))
    return laws


def held_out(cells: Cells) -> dict[str, np.ndarray]:
    """What the law of the other cells says of those left out: name -> (n,) losses, NaN where nothing was left out, or too little kept.

    "one cell": each cell from all others; "largest size" and "longest runs": all cells of it, from smaller and from shorter ones alone.
    """
    found = {"one cell": np.full(len(cells), math.nan)}
    groups = [("one cell", np.arange(len(cells)) == i) for i in range(len(cells))]
    groups += [
        ("largest size", cells.parameters == cells.parameters.max()),
        ("longest runs", cells.tokens == cells.tokens.max()),
    ]
    for name, out in groups:
        predicted = found.setdefault(name, np.full(len(cells), math.nan))
        if not cells.take(~out).lacking(IDENTIFIED):
            predicted[out] = fit(cells.take(~out), restarts=RESTARTS).loss(cells.parameters[out], cells.tokens[out])
    return found


def errors(loss: np.ndarray, predicted: np.ndarray) -> dict[str, float] | None:
    """Of predictions (n,), NaN where there is none: mean and largest size, the mean with its sign, and the mean size relative to the loss.

    None without any.
    """
    there = np.isfinite(predicted)
    if not there.any():
        return None
    error = (predicted - loss)[there]
    size = np.abs(error)
    figures = {
        "mean": size.mean(),
        "largest": size.max(),
        "bias": error.mean(),
        "relative": (size / loss[there]).mean(),
    }
    return {"cells": int(there.sum())} | {name: float(value) for name, value in figures.items()}


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The percentiles of a bootstrap that enclose `confidence` of it."""
    low, high = np.quantile(np.asarray(values, float), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
