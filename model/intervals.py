"""Confidence intervals of a mean, with Student's t distribution: of independent observations, and of clustered ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MIN_DOCUMENTS = 10  # with fewer, the clusters are contiguous blocks of windows
# Neighboring windows often belong to one document, so they are not independent; long blocks of windows nearly are.
# Fewer and longer blocks capture more of the dependence, and 10 to 30 of them suffice to estimate the variance of the
# mean (Schmeiser 1982, "Batch size effects in the analysis of simulation output").
BLOCKS = 20


@dataclass(frozen=True)
class Interval:
    """A mean over n observations and its confidence interval; low = high = None where there is no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def half_width(self) -> float:
        """Of an interval that exists."""
        assert self.high is not None, "an interval needs two observations with finite values"
        return self.high - self.mean

    def map(self, change: Callable[[float], float]) -> "Interval":
        """The interval of an increasing function of the mean."""
        low, high = (None if end is None else change(end) for end in (self.low, self.high))
        return Interval(change(self.mean), low, high, self.n)


@dataclass(frozen=True)
class ClusteredMean:
    """A mean over n clusters of unequal size, see `clustered_mean`.

    Attributes:
        se: standard error of the mean; NaN for fewer than two clusters or a loss that is not finite.
        df: degrees of freedom of Student's t for mean / se; 0 where se is NaN.
    """

    mean: float
    se: float
    df: float
    n: int

    def interval(self, confidence: float = 0.95) -> Interval:
        """Confidence interval of the mean; without low and high where se is NaN."""
        if math.isnan(self.se):
            return Interval(self.mean, None, None, self.n)
        half = t_quantile(self.df, 1 - confidence) * self.se
        return Interval(self.mean, self.mean - half, self.mean + half, self.n)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of independent observations, such as one per seed, with its confidence interval.

    One value has no interval. A value that is not finite (a diverged run) makes the mean not finite, without interval.
    """
    return clustered_mean(values, np.ones(len(values))).interval(confidence)


def clustered_mean(nll: Sequence[float] | np.ndarray, targets: Sequence[float] | np.ndarray) -> ClusteredMean:
    """Mean per target, sum(nll) / sum(targets), with a standard error that allows for dependence within clusters.

    The targets of a cluster (a document) may depend on each other in any way; clusters are independent. This is the
    regression of the targets' losses on a constant with the variance estimator CR2 and the degrees of freedom of Bell
    and McCaffrey (2002, "Bias reduction in standard errors for linear regression with multi-stage samples"), whose
    working model are independent targets. Few large clusters give few degrees of freedom; G of equal size give G - 1.

    Args:
        nll: (G,) sum of the losses of each cluster, or of differences of losses.
        targets: (G,) number of targets of each cluster; clusters without targets are left out.
    """
    sums, sizes = np.asarray(nll, float), np.asarray(targets, float)
    assert sums.shape == sizes.shape == (len(sizes),) and (sizes >= 0).all(), (sums.shape, sizes.shape)
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    n = len(sizes)
    with np.errstate(invalid="ignore"):  # inf - inf
        mean = float(sums.sum() / sizes.sum()) if n else math.nan
    if n < 2 or not math.isfinite(mean):
        return ClusteredMean(mean, math.nan, 0.0, n)
    share = sizes / sizes.sum()  # (G,) the leverage of each cluster
    residuals = sums / sizes.sum() - mean * share  # (G,), they sum to 0
    variance = float(np.sum(residuals**2 / (1 - share)))
    # The variance is a quadratic form in the sums of the clusters. Relative to the true variance, its expectation under
    # the working model is 1, and half of its variance is the sum of the squared elements of the form's matrix, whose
    # diagonal is `share` and whose other elements are products of roots of `leverage`.
    leverage = share**2 / (1 - share)
    df = 1 / float(np.sum(share**2) + np.sum(leverage) ** 2 - np.sum(leverage**2))
    return ClusteredMean(mean, math.sqrt(variance), df, n)


def block_starts(weights: np.ndarray, n_blocks: int = BLOCKS) -> np.ndarray:
    """First window of each of at most n_blocks contiguous blocks of about equal weight; weights (N,) are above 0."""
    middles = (np.cumsum(weights) - weights / 2) / np.sum(weights)  # of each window, as shares of the text
    blocks = (middles * min(n_blocks, len(weights))).astype(int)  # (N,), ascending
    return np.flatnonzero(np.diff(blocks, prepend=-1))


def t_quantile(df: float, alpha: float) -> float:
    """Two-sided quantile of Student's t: a t variable exceeds it in absolute value with probability alpha."""
    from scipy.special import stdtrit  # scipy.stats takes seconds to import

    return -float(stdtrit(df, alpha / 2))


def mean_and_ends(interval: Interval, sign: str = "") -> str:
    """ "2.8516 [2.8401, 2.8631]". Sign: of the format, "+" writes it always."""
    ends = [f"{x:{sign}z.4f}" for x in (interval.low, interval.high) if x is not None]
    return f"{interval.mean:{sign}z.4f} [{', '.join(ends) or 'no interval'}]"


def spread(interval: Interval, sign: str = "") -> str:
    """2.8516 ± 0.0123; the mean alone without an interval."""
    if not math.isfinite(interval.mean):
        return "diverged" if interval.n else "-"
    half = "" if interval.low is None else f" ± {interval.half_width:.4f}"
    return f"{interval.mean:{sign}.4f}{half}"
