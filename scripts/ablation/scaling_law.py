"""The loss as a function of parameters and tokens: L(N, D) = E + A / N^alpha + B / D^beta, fitted to a sweep.

N parameters, D training tokens, L nats per token. The form and the fit (Huber loss on log L, from a grid of starts) are
those of Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, section 3.3 and appendix D.3. Besiroglu et al. 2024,
https://arxiv.org/abs/2404.10102, show two pitfalls: an optimizer that stops early, and intervals that are too narrow.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from tril.scripts.ablation.results import Sweep
from tril.scripts.cli.errors import command

DELTA = 1e-3  # Hoffmann et al.: relative errors beyond it count linearly instead of quadratically
EXPONENTS = (0.01, 2.0)  # bounds of alpha and beta; Hoffmann et al. start from 0 to 2
TERMS = (1e-3, 100.0)  # bounds in nats of E, and of the other two terms in the middle of the data; the lower one is ~ 0
STARTS = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2)  # of alpha and of beta, in all pairs
LIMITS = np.array([np.log(TERMS)] * 3 + [EXPONENTS] * 2)  # (5, 2) of theta, see `residuals`
RESTARTS = 4  # how many of the starts are followed, the best ones, if many laws are fitted
TOLERANCES = {"x_scale": "jac", "ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-15}
MAX_EVALUATIONS = 1000  # from each start; 100 are too few if E ends at its bound
PARAMETERS = ("E", "A", "B", "alpha", "beta")
MIN_FIT = {"sizes": 4, "token counts": 3, "points": 6}  # five parameters, and a point for the error
MIN_LAW = {"token counts": 5, "seeds at every point": 2}  # with fewer, the form of the law cannot be tested


@dataclass(frozen=True)
class Points:
    """The finished variants of a sweep in order of size and tokens, each one point of the fit; n points, S seeds.

    Attributes:
        parameters: (n,) N.
        tokens: (n,) D.
        by_seed: (n, S) final validation losses in nats per token; NaN where a point lacks a seed.
    """

    labels: tuple[str, ...]
    parameters: np.ndarray
    tokens: np.ndarray
    by_seed: np.ndarray

    def __len__(self) -> int:
        return len(self.by_seed)

    @property
    def seeds(self) -> np.ndarray:
        """(n,) number of seeds of each point."""
        return np.isfinite(self.by_seed).sum(1)

    @property
    def loss(self) -> np.ndarray:
        """(n,) mean over seeds."""
        return np.nanmean(self.by_seed, axis=1)

    @property
    def spread(self) -> np.ndarray:
        """(n,) standard deviation between seeds; NaN for one seed."""
        squares = np.nansum((self.by_seed - self.loss[:, None]) ** 2, axis=1)
        return np.sqrt(squares / np.where(self.seeds > 1, self.seeds - 1, math.nan))

    def with_loss(self, loss: np.ndarray) -> "Points":
        """The same points with one loss each, (n,)."""
        return replace(self, by_seed=loss[:, None])

    def take(self, rows) -> "Points":
        """The points of a mask (n,), or of indices, which may repeat."""
        rows = np.arange(len(self))[rows]
        arrays = (getattr(self, field.name)[rows] for field in fields(self)[1:])
        return Points(tuple(self.labels[row] for row in rows), *arrays)

    def shortfall(self, required: Mapping[str, int]) -> list[str]:
        """Which counts are below the required ones."""
        pairs = np.stack([self.parameters, self.tokens], 1)
        distinct = {"sizes": self.parameters, "token counts": self.tokens, "points": pairs}
        counts = {name: len(np.unique(values, axis=0)) for name, values in distinct.items()}
        counts["seeds at every point"] = int(min(self.seeds, default=0))
        return [
            f"{counts[name]} of at least {least} {name}" for name, least in required.items() if counts[name] < least
        ]


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
    seeds = sorted({run.seed for variant in usable for run in variant.finished})
    rows: dict[tuple[float, float], tuple] = {}  # by N and D
    for variant in usable:
        at = (variant.figures(size)[0], variant.figures("tokens")[0])
        if at in rows:
            raise ValueError(
                f"{rows[at][0]} and {variant.label} have the same parameters and tokens; sweep one configuration "
                "of each size"
            )
        losses = {run.seed: run.summary["final_val_loss"] for run in variant.finished if run.summary}
        rows[at] = variant.label, [losses.get(seed, math.nan) for seed in seeds]
    order = sorted(rows)
    sizes, tokens = np.array(order, float).reshape(-1, 2).T
    by_seed = np.array([rows[at][1] for at in order], float).reshape(len(order), len(seeds))
    points = Points(tuple(rows[at][0] for at in order), sizes, tokens, by_seed)
    if shortfall := points.shortfall(MIN_FIT):
        raise ValueError(
            f"{sweep.folder} has too few finished runs, {', '.join(shortfall)}; train more with "
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

    n, d, middle = centered_logs(points)
    data = n, d, np.log(points.loss)
    begin = sorted(starts(n, d, points.loss), key=lambda theta: huber(DELTA, residuals(theta, *data)).sum())[:restarts]
    robust = {"loss": "huber", "f_scale": DELTA, "bounds": LIMITS.T, "max_nfev": MAX_EVALUATIONS}
    options = {"jac": jacobian, "args": data} | robust | TOLERANCES
    ends = [least_squares(residuals, theta, **options) for theta in begin]
    theta = min(ends, key=lambda end: end.cost).x
    at_bound = [name for i, name in enumerate(PARAMETERS) if np.isclose(theta[i], LIMITS[i], atol=1e-4).any()]
    e, a, b, alpha, beta = theta.tolist()
    scales = math.exp(e), math.exp(a + alpha * middle[0]), math.exp(b + beta * middle[1])
    return Law(*scales, alpha, beta, tuple(at_bound))


def centered_logs(points: Points) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """(n,) logarithms of N and of D, each minus its mean, and the two means."""
    n, d = np.log(points.parameters), np.log(points.tokens)
    return n - n.mean(), d - d.mean(), (float(n.mean()), float(d.mean()))


def starts(n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> Iterator[np.ndarray]:
    """One start for every pair of exponents: for given exponents the law is linear in E, A and B."""
    from scipy.optimize import nnls

    for alpha, beta in itertools.product(STARTS, STARTS):
        terms, _ = nnls(np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], 1), loss)
        yield np.array([*np.log(np.clip(terms, 2 * TERMS[0], TERMS[1] / 2)), alpha, beta])
