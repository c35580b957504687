"""The loss as a function of parameters and tokens: L(N, D) = E + A / N^alpha + B / D^beta, fitted to a sweep.

N parameters, D training tokens, L nats per token. The form and the fit (Huber loss on log L, from a grid of starts) are
those of Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, section 3.3 and appendix D.3. Besiroglu et al. 2024,
https://arxiv.org/abs/2404.10102, show two pitfalls: an optimizer that stops early, and intervals that are too narrow.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from tril.scripts.ablation.results import Sweep
from tril.scripts.common.cli import command

DELTA = 1e-3  # Hoffmann et al.: relative errors beyond it count linearly instead of quadratically
EXPONENTS = (0.01, 2.0)  # bounds of alpha and beta; Hoffmann et al. start from 0 to 2
TERMS = (1e-3, 100.0)  # bounds in nats of E, and of the other two terms in the middle of the data; the lower one is ~ 0
STARTS = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2)  # of alpha and of beta, in all pairs
RESTARTS = 4  # how many of the starts are followed, the best ones, if many laws are fitted
MAX_EVALUATIONS = 1000  # from each start; 100 are too few if E ends at its bound
PARAMETERS = ("E", "A", "B", "alpha", "beta")
MAX_NOISE = 3.0  # in log L, a factor of 20: far beyond any interval, and every number stays finite
MIN_FIT = {"sizes": 4, "token counts": 3, "points": 6}  # five parameters, and a point for the error
MIN_HELD_OUT = {"sizes": 3, "token counts": 3, "points": 6}  # a curve with an offset needs three


@dataclass(frozen=True)
class Points:
    """The finished variants of a sweep in order of size and tokens, each one point of the fit; n points.

    Attributes:
        parameters: (n,) N.
        tokens: (n,) D.
        loss: (n,) mean over seeds of the final validation loss in nats per token.
        seeds: (n,) number of seeds.
        spread: (n,) standard deviation between seeds; NaN for one seed.
    """

    labels: tuple[str, ...]
    parameters: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    seeds: np.ndarray
    spread: np.ndarray

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows) -> "Points":
        """The points of a mask (n,), or of indices, which may repeat."""
        rows = np.arange(len(self))[rows]
        arrays = (getattr(self, field.name)[rows] for field in fields(self)[1:])
        return Points(tuple(self.labels[row] for row in rows), *arrays)

    def shortfall(self, required: Mapping[str, int]) -> str:
        """Which counts are below the required ones; empty if none is."""
        pairs = np.stack([self.parameters, self.tokens], 1)
        distinct = {"sizes": self.parameters, "token counts": self.tokens, "points": pairs}
        counts = {name: len(np.unique(values, axis=0)) for name, values in distinct.items()}
        return ", ".join(f"{counts[name]} {name} of at least {n}" for name, n in required.items() if counts[name] < n)


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats per token.

    Attributes:
        bounds: the parameters that ended at a bound of the fit: the data do not determine them.
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
        """N and D of the lowest loss at 6 N D = `flops`: Hoffmann et al., equation 4."""
        exponents, product = self.alpha + self.beta, flops / 6
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponents)
        return ratio * product ** (self.beta / exponents), product ** (self.alpha / exponents) / ratio


def points_of(sweep: Sweep, size: str) -> Points:
    """The finished variants as points.

    Args:
        sweep: of different sizes and numbers of tokens.
        size: the entry of summary.json that counts as N.

    Raises:
        ValueError: several texts or tokenizers, two variants with the same N and D, or too few points.
    """
    usable = [v for v in sweep.variants if v.finished and all(map(math.isfinite, v.figures("final_val_loss")))]
    if len({run.summary.get("data_fingerprint") for v in usable for run in v.finished if run.summary}) > 1:
        raise ValueError(
            f"{sweep.folder} has runs of several texts or tokenizers, whose losses are not comparable; sweep each alone"
        )
    rows: dict[tuple[float, float], tuple] = {}  # by N and D
    for variant in usable:
        at = (variant.figures(size)[0], variant.figures("tokens")[0])
        if at in rows:
            raise ValueError(
                f"{rows[at][-1]} and {variant.label} have the same parameters and tokens; sweep one configuration "
                "of each size"
            )
        losses = variant.figures("final_val_loss")
        spread = np.std(losses, ddof=1) if len(losses) > 1 else math.nan
        rows[at] = (*at, np.mean(losses), len(losses), spread, variant.label)
    *columns, labels = zip(*(rows[at] for at in sorted(rows)), strict=True) if rows else ((),) * 6
    points = Points(tuple(labels), *(np.array(column, float) for column in columns))
    if shortfall := points.shortfall(MIN_FIT):
        raise ValueError(
            f"{sweep.folder} has too few finished runs, {shortfall}; train more with "
            f"{command('train')} -m +ablation=scaling"
        )
    return points


def residuals(theta: np.ndarray, n: np.ndarray, d: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """log L of the law minus that of the points, (n,).

    Args:
        theta: log E, the logarithms of the other two terms where n and d are 0, alpha, beta.
        n: (n,) logarithm of N, minus its mean.
        d: (n,) logarithm of D, minus its mean.
        log_loss: (n,) logarithm of the measured losses.
    """
    return np.logaddexp.reduce(log_terms(theta, n, d)) - log_loss


def jacobian(theta: np.ndarray, n: np.ndarray, d: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """The derivatives of `residuals` with respect to theta, (n, 5)."""
    logs = log_terms(theta, n, d)
    shares = np.exp(logs - np.logaddexp.reduce(logs))  # (3, n) of each term in the loss
    return np.stack([*shares, -shares[1] * n, -shares[2] * d], 1)


def log_terms(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The logarithms of E, A / N^alpha and B / D^beta: (3, n)."""
    return np.stack([np.full_like(n, theta[0]), theta[1] - theta[3] * n, theta[2] - theta[4] * d])


def fit(points: Points, *, restarts: int | None = None) -> Law:
    """The law with the lowest Huber loss; `restarts`: how many of the starts are followed, the best ones; None: all."""
    from scipy.optimize import least_squares
    from scipy.special import huber

    middle = np.log(points.parameters).mean(), np.log(points.tokens).mean()
    n, d = np.log(points.parameters) - middle[0], np.log(points.tokens) - middle[1]
    data = n, d, np.log(points.loss)
    limits = np.array([np.log(TERMS)] * 3 + [EXPONENTS] * 2)  # (5, 2)
    begin = sorted(starts(n, d, points.loss), key=lambda theta: huber(DELTA, residuals(theta, *data)).sum())[:restarts]
    robust = {"loss": "huber", "f_scale": DELTA, "bounds": limits.T, "max_nfev": MAX_EVALUATIONS}
    tolerances = {"x_scale": "jac", "ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-15}
    options = {"jac": jacobian, "args": data} | robust | tolerances
    ends = [least_squares(residuals, theta, **options) for theta in begin]
    theta = min(ends, key=lambda end: end.cost).x
    at_bound = [name for i, name in enumerate(PARAMETERS) if np.isclose(theta[i], limits[i], atol=1e-4).any()]
    e, a, b, alpha, beta = theta.tolist()
    scales = math.exp(e), math.exp(a + alpha * middle[0]), math.exp(b + beta * middle[1])
    return Law(*scales, alpha, beta, tuple(at_bound))


def starts(n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> Iterator[np.ndarray]:
    """One start for every pair of exponents: for given exponents the law is linear in E, A and B."""
    from scipy.optimize import nnls

    for alpha, beta in itertools.product(STARTS, STARTS):
        terms, _ = nnls(np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], 1), loss)
        yield np.array([*np.log(np.clip(terms, 2 * TERMS[0], TERMS[1] / 2)), alpha, beta])


def resample(points: Points, law: Law, times: int, seed: int) -> list[Law]:
    """Fits `times` copies of the points whose losses are those of `law` with normal noise on their logarithms.

    Points drawn with replacement, the usual bootstrap, would often not determine a law: of six points only all six do.
    The noise has the size of the residuals. Few residuals leave that size uncertain, so it is drawn anew for each copy:
    for a linear law, the middle 95 % would be the interval of Student's t with n - 5 degrees of freedom.
    """
    generator, fitted = np.random.default_rng(seed), law.loss(points.parameters, points.tokens)
    squares, laws = (np.log(points.loss / fitted) ** 2).sum(), []
    for _ in range(times):
        scale = np.sqrt(squares / generator.chisquare(len(points) - len(PARAMETERS)))
        noise = np.clip(scale * generator.normal(size=len(points)), -MAX_NOISE, MAX_NOISE)
        laws.append(fit(replace(points, loss=fitted * np.exp(noise)), restarts=RESTARTS))
    return laws


def predict_held_out(points: Points) -> dict[str, np.ndarray]:
    """Predicts points from the law of the others: name -> (n,) losses, NaN if not held out or if too few points remain.

    "one point": each point from all others; "largest size" and "longest runs": all points of it from smaller sizes or
    shorter runs alone.
    """
    folds = [("one point", np.arange(len(points)) == i) for i in range(len(points))]
    folds.append(("largest size", points.parameters == points.parameters.max()))
    folds.append(("longest runs", points.tokens == points.tokens.max()))
    predictions = {name: np.full(len(points), math.nan) for name, _ in folds}
    for name, out in folds:
        if not points.take(~out).shortfall(MIN_HELD_OUT):
            law = fit(points.take(~out), restarts=RESTARTS)
            predictions[name][out] = law.loss(points.parameters[out], points.tokens[out])
    return predictions


def prediction_errors(loss: np.ndarray, predicted: np.ndarray) -> dict[str, float] | None:
    """Errors of predictions (n,), of which some may be NaN: mean, largest, mean with sign, mean relative to the loss.

    None without any prediction.
    """
    known = np.isfinite(predicted)
    if not known.any():
        return None
    error = (predicted - loss)[known]
    size = np.abs(error)
    figures = {
        "mean": size.mean(),
        "largest": size.max(),
        "bias": error.mean(),
        "relative": (size / loss[known]).mean(),
    }
    return {"points": int(known.sum())} | {name: float(value) for name, value in figures.items()}


def percentile_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The percentiles of a bootstrap that enclose `confidence` of it."""
    low, high = np.quantile(np.asarray(values, float), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
