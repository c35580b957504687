"""Do the losses have the form L(N, D) = E + A / N^alpha + B / D^beta, or do their residuals have structure?

Two tests on the logarithm of the loss, with a least-squares fit, for which F and t have known distributions. The
interaction: does a multiple of ln N x ln D explain the residuals, so that one more parameter improves the fit by more
than chance? Lack of fit: do the points scatter around the law more than seeds scatter around their point?
"""

import math
from dataclasses import dataclass

import numpy as np

from tril.scripts.ablation.scaling_law import (
    LIMITS,
    MAX_EVALUATIONS,
    PARAMETERS,
    RESTARTS,
    TOLERANCES,
    Law,
    Points,
    centered_logs,
    jacobian,
    residuals,
    starts,
)

ALPHA = 0.05  # probability that the tests together reject a form that is right
ROUNDING = 1e-12  # variance of log L by float32: losses of equal runs, or of a formula, have no other


@dataclass(frozen=True)
class MeanSquare:
    """A variance of the logarithm of the loss of one run, and its degrees of freedom."""

    value: float
    df: int


@dataclass(frozen=True)
class FormTest:
    """A test of the form.

    Attributes:
        statistic: t of the interaction, with its sign, or F of the lack of fit.
        df: degrees of freedom: of the error for t, (of the form, of the error) for F.
        p: two-sided, multiplied by the number of tests.
    """

    statistic: float
    df: tuple[int, ...]
    p: float


@dataclass(frozen=True)
class FormTests:
    """What the residuals tell about the form of the law.

    Attributes:
        correlation: of loss - law in nats with ln N x ln D, both centered.
        extra_gain: nats per token that the largest size gains from the longest instead of the shortest runs more than
            the smallest size does, beyond what the law allows.
        extra_gain_error: half width of its 95 % interval; None without a test.
        interaction: None if no degree of freedom is left for its error.
        lack_of_fit: None if no point has two seeds.
        residual: from the points around the least-squares law.
        pure_error: from the seeds around their points; None if no point has two seeds.
        seed_range: of what a seed changes in log L at all points alike.
    """

    correlation: float
    extra_gain: float
    extra_gain_error: float | None
    interaction: FormTest | None
    lack_of_fit: FormTest | None
    residual: MeanSquare
    pure_error: MeanSquare | None
    seed_range: float

    @property
    def rejected(self) -> bool:
        return any(test is not None and test.p < ALPHA for test in (self.interaction, self.lack_of_fit))

    @property
    def noise(self) -> MeanSquare:
        """The larger estimate of the error of a run, so that a lack of fit which no test found widens intervals."""
        found = [square for square in (self.residual, self.pure_error) if square is not None]
        return max(found, key=lambda square: square.value)


def check_form(points: Points, law: Law) -> FormTests:
    """Tests the form of `law`, which was fitted to `points`."""
    from scipy.special import fdtrc, stdtr, stdtrit

    n, d, _ = centered_logs(points)
    without, _ = least_squares_fit(points)
    with_term, coefficient = least_squares_fit(points, interaction=True)
    explained, df = max(0.0, without - with_term), len(points) - len(PARAMETERS)
    pure, seed_range = pure_error(points)
    residual = MeanSquare(max(ROUNDING, without / df), df)
    tests = 1 if pure is None else 2
    error = MeanSquare(max(ROUNDING, with_term / (df - 1)), df - 1) if pure is None and df > 1 else pure
    extra_gain = float(-coefficient * np.ptp(n) * np.ptp(d) * points.loss.mean())
    interaction = lack_of_fit = half_width = None
    if error is not None:
        t = math.copysign(math.sqrt(explained / error.value), coefficient)
        half_width = abs(extra_gain / t) * float(stdtrit(error.df, 1 - ALPHA / 2)) if t else None
        interaction = FormTest(t, (error.df,), min(1.0, tests * 2 * float(stdtr(error.df, -abs(t)))))
    if pure is not None:
        f = residual.value / pure.value
        lack_of_fit = FormTest(f, (df, pure.df), min(1.0, tests * float(fdtrc(df, pure.df, f))))
    return FormTests(
        correlation=correlation(points.loss - law.loss(points.parameters, points.tokens), n * d),
        extra_gain=extra_gain,
        extra_gain_error=half_width,
        interaction=interaction,
        lack_of_fit=lack_of_fit,
        residual=residual,
        pure_error=pure,
        seed_range=seed_range,
    )


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 if one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt((x**2).sum() * (y**2).sum())
    return float((x * y).sum() / size) if size else 0.0


def pure_error(points: Points) -> tuple[MeanSquare | None, float]:
    """The variance between the seeds of a point, and the range of what a seed changes at all points alike.

    Seeds are blocks: such a change multiplies E, A and B, so it is no lack of fit.

    Returns:
        The variance, None without degrees of freedom, and the range in log L, 0 for one seed.
    """
    row, column = np.nonzero(np.isfinite(points.by_seed))  # of each run
    design = np.hstack([row[:, None] == np.unique(row), column[:, None] == np.unique(column)[1:]]).astype(float)
    y = np.log(points.by_seed[row, column])
    estimate, _, rank, _ = np.linalg.lstsq(design, y)
    df = len(y) - int(rank)
    seeds = [0.0, *estimate[len(points) :]]  # the first seed is the reference
    square = MeanSquare(max(ROUNDING, float(((y - design @ estimate) ** 2).sum() / df)), df) if df else None
    return square, float(np.ptp(seeds))


def least_squares_fit(points: Points, *, interaction: bool = False) -> tuple[float, float]:
    """The lowest sum of squares of log L - log law - coefficient x ln N x ln D, and the coefficient.

    Every point counts by its seeds: the sum divided by its degrees of freedom is a variance of one run.

    Args:
        points: n points.
        interaction: False: without the last term.
    """
    from scipy.optimize import least_squares

    n, d, _ = centered_logs(points)
    weights, data = np.sqrt(points.seeds), (n, d, np.log(points.loss))
    term = (n * d)[:, None] * np.ones(int(interaction))  # (n, 0 or 1)

    def errors(theta: np.ndarray) -> np.ndarray:
        return weights * (residuals(theta[:5], *data) + term @ theta[5:])

    def derivatives(theta: np.ndarray) -> np.ndarray:
        return weights[:, None] * np.hstack([jacobian(theta[:5], *data), term])

    begin = [np.append(theta, np.zeros(int(interaction))) for theta in starts(n, d, points.loss)]
    begin = sorted(begin, key=lambda theta: (errors(theta) ** 2).sum())[:RESTARTS]
    bounds = np.vstack([LIMITS, np.tile([-np.inf, np.inf], (int(interaction), 1))]).T
    options = {"jac": derivatives, "bounds": bounds, "max_nfev": MAX_EVALUATIONS} | TOLERANCES
    best = min((least_squares(errors, theta, **options) for theta in begin), key=lambda end: end.cost)
    return 2 * float(best.cost), float(best.x[5]) if interaction else 0.0
