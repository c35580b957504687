"""Compares two arms pair by pair, and may stop after any pair: an interval that is valid at all pairs at once.

The differences d_1, d_2, ... of the losses of the two arms, one for each pair of runs, are taken as independent normal
observations with unknown mean and variance. Two ordinary intervals after each pair would miss the mean somewhere with a
probability far above 5 %. These intervals form a confidence sequence: the probability that any one of the first
MAX_PAIRS misses the mean is ALPHA, so every rule for stopping is allowed.

The interval after n pairs holds the means mu for which the Bayes factor of "the mean is not mu" is below a threshold:
effects (true mean - mu) / sigma with a normal prior of standard deviation EFFECT_PRIOR, and the right Haar prior on
sigma (Lai 1976, "On confidence sequences"; Wang and Ramdas 2023, "Anytime-valid t-tests and confidence sequences for
Gaussian means with unknown variance"). With the threshold 1 / ALPHA it would be valid for ever (Ville 1939), and miss
the mean in 2.9 % within MAX_PAIRS. The Bayes factor is a function of the t statistic, whose distribution for normal
observations has no unknown parameter, so the threshold that makes it exactly ALPHA is computed by simulation.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

ALPHA = 0.05  # probability that any interval of a comparison misses the true difference
MAX_PAIRS = 100  # pairs for which the probability holds
EFFECT_PRIOR = 2.0  # in standard deviations of a difference; from 1 to 3 the number of pairs hardly changes
PATHS = 100_000  # simulated sequences behind the threshold
CHUNK = 10_000  # of them at a time


def log_bayes_factor(n: np.ndarray | int, t_squared: np.ndarray) -> np.ndarray:
    """Of an effect other than 0 against none, after n > 1 normal observations with the t statistic t."""
    k = 1 + n * EFFECT_PRIOR**2
    ratio = t_squared / (n - 1)
    return -0.5 * np.log(k) + 0.5 * n * (np.log1p(ratio) - np.log1p(ratio / k))


@functools.cache
def log_threshold(alpha: float = ALPHA, max_pairs: int = MAX_PAIRS) -> float:
    """The bound that the log Bayes factor of true differences exceeds at any n <= max_pairs with probability alpha.

    The order statistic is taken two standard errors of the simulation too high rather than too low.
    """
    rng, largest = np.random.default_rng(0), []
    n = np.arange(1, max_pairs + 1)
    for _ in range(PATHS // CHUNK):
        x = rng.standard_normal((CHUNK, max_pairs))
        total = x.cumsum(1)
        squares = (x**2).cumsum(1) - total**2 / n  # sums of squared deviations
        t_squared = total[:, 1:] ** 2 / n[1:] / squares[:, 1:] * (n[1:] - 1)
        largest.append(log_bayes_factor(n[1:], t_squared).max(1))
    error = math.sqrt(alpha * (1 - alpha) / PATHS)
    return float(np.quantile(np.concatenate(largest), 1 - alpha + 2 * error))


def half_width(n: int, sd: float, threshold: float | None = None) -> float:
    """Of the interval around the mean of n differences with the standard deviation sd; inf while n is too small.

    Args:
        threshold: a bound of the log Bayes factor; None: `log_threshold()`.
    """
    threshold = log_threshold() if threshold is None else threshold
    k = 1 + n * EFFECT_PRIOR**2
    log_ratio = (math.log(k) + 2 * threshold) / n  # of 1 + t^2 / (n - 1) to 1 + t^2 / (n - 1) / k, at the bound
    if n < 2 or log_ratio >= math.log(k):
        return math.inf
    ratio = math.exp(log_ratio)
    return sd * math.sqrt((ratio - 1) / (1 - ratio / k) * (n - 1) / n)


# How seeds and text combine: half = (seeds^p + text^p)^(1/p). The error of the text is the same at all pairs, while the
# mean over seeds moves, so p = 2, right for a single look, misses the true difference in up to 7.6 % of simulations;
# p = 1.1 is the largest tenth that keeps 5 % at every ratio of the two.
COMBINATION = 1.1


@dataclass(frozen=True)
class Look:
    """The estimate after n pairs.

    Attributes:
        mean: of the differences candidate - baseline.
        sd: their standard deviation; NaN for one pair.
        seeds: half width of the interval for other seeds on this text; inf while there are too few pairs.
        text: half width for another text of the same kind; 0 if the claim is about this text.
    """

    n: int
    mean: float
    sd: float
    seeds: float
    text: float

    @classmethod
    def at(cls, differences: np.ndarray, text: float = 0.0) -> "Look":
        """The look at differences (n,), all finite."""
        n = len(differences)
        sd = float(np.std(differences, ddof=1)) if n > 1 else math.nan
        seeds = half_width(n, sd)
        if n > 1 and not differences.any():  # identical arms with the same seeds on a deterministic machine
            seeds = text = 0.0
        return cls(n, float(np.mean(differences)), sd, seeds, text)

    @property
    def half(self) -> float:
        """Half width of the interval."""
        if not math.isfinite(self.seeds):
            return math.inf
        return (self.seeds**COMBINATION + self.text**COMBINATION) ** (1 / COMBINATION)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def verdict(self, margin: float) -> str | None:
        """better: the whole interval is below 0; worse: above 0; equal: within +-margin; None: none of them.

        An interval below 0 and within the margin is better.
        """
        if self.high < 0:
            return "better"
        if self.low > 0:
            return "worse"
        return "equal" if max(-self.low, self.high) < margin else None

    def settled_by_text(self, margin: float) -> bool:
        """Whether no number of pairs gives a verdict: wherever the mean over all seeds is in its interval, the interval
        over texts holds 0 and leaves the margin.
        """
        return self.text >= margin and abs(self.mean) + self.seeds <= self.text

    def pairs_needed(self, margin: float) -> int | None:
        """Pairs in total that give a verdict if mean and standard deviation stay as they are; None: over MAX_PAIRS."""
        if self.n < 2:
            return None
        for n in range(self.n + 1, MAX_PAIRS + 1):
            later = Look(n, self.mean, self.sd, half_width(n, self.sd), self.text)
            if later.verdict(margin):
                return n
        return None
