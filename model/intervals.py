"""Confidence intervals of a mean, with Student's t distribution."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean over n observations and its confidence interval; low = high = None where there is no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of independent observations, such as one per seed, with its confidence interval.

    One value has no interval. A value that is not finite (a diverged run) makes the mean not finite, without interval.
    """
    n = len(values)
    with np.errstate(invalid="ignore"):  # inf - inf
        mean = float(np.mean(values)) if n else math.nan
    if n < 2 or not math.isfinite(mean):
        return Interval(mean, None, None, n)
    half = student_quantile(n, 1 - confidence) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


@functools.lru_cache(maxsize=1000)
def student_quantile(n: int, alpha: float) -> float:
    """Two-sided quantile of Student's t for a mean of n observations; for n = 1 with one degree of freedom."""
    from scipy.special import stdtrit  # scipy.stats takes seconds to import

    return -float(stdtrit(max(1, n - 1), alpha / 2))
