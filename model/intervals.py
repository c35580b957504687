"""Confidence intervals of a mean, by Student's t."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds and its confidence interval. low = high = None: one seed gives none, nor do values that are not finite."""

    mean: float
    low: float | None
    high: float | None
    n: int


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Of values that are one for each seed, by Student's t. A value that is not finite (a diverged run) makes the mean so, too."""
    n = len(values)
    with np.errstate(invalid="ignore"):  # inf - inf
        mean = float(np.mean(values)) if n else math.nan
    if n < 2 or not math.isfinite(mean):
        return Interval(mean, None, None, n)
    half = student_quantile(n, 1 - confidence) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


@functools.lru_cache(maxsize=1000)
def student_quantile(n: int, alpha: float) -> float:
    """Student's, two-sided, for n observations; of one it does not count."""
    from scipy.special import stdtrit

    return -float(stdtrit(max(1, n - 1), alpha / 2))
