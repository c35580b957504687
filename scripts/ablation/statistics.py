"""What losses over seeds and over text allow to conclude.

A configuration is trained with some seeds and validated on one text, so its loss is uncertain in two ways: other seeds
give other weights, and another text of the same kind is easier or harder. Configurations are compared in pairs, seed by
seed and window by window: what a seed or a window changes for both of them cancels.

S seeds, N validation windows, K blocks of windows.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tril.model.intervals import Interval, student_quantile

# Neighboring windows often belong to one document, so they are not independent; long blocks of windows nearly are.
# Fewer and longer blocks capture more of the dependence, and 10 to 30 of them suffice to estimate the variance of the
# mean (Schmeiser 1982, "Batch size effects in the analysis of simulation output").
BLOCKS = 20
POWER = 0.8  # probability that the proposed number of seeds settles a comparison
MIN_P = 1e-300  # smaller p values count as 0
MAX_SEEDS = 100  # in total; more are not proposed
NODES = 100  # of the integral over the estimated variance between seeds
TOO_MANY = f"More than {MAX_SEEDS} seeds would be needed."


@dataclass(frozen=True)
class Comparison:
    """A variant compared with the baseline.

    Attributes:
        difference: variant - baseline, with its interval at the family-wise confidence.
        p: two-sided, corrected for the number of comparisons; None without an interval.
        verdict: "better" (a lower loss), "worse", "not distinguishable", "one seed" (fewer than 2 common seeds: no
            statement) or "diverged" (a loss that is not finite: no statement).
        more_seeds: for "not distinguishable", how many more seeds settle it with probability POWER if variance and
            difference stay as observed; None if no number up to MAX_SEEDS does (the remark says why).
        remark: sentences; may be empty.
        unit: of the difference.
    """

    difference: Interval
    p: float | None
    verdict: str
    more_seeds: int | None
    remark: str
    unit: str = "nats per token"


def compare(
    variant: Mapping[int, np.ndarray],
    baseline: Mapping[int, np.ndarray],
    weights: np.ndarray,
    *,
    n_comparisons: int,
    confidence: float = 0.95,
) -> Comparison:
    """Compares two configurations over their common seeds, with Bonferroni's correction.

    Seeds and text are crossed random effects: d[s, k] = mean + seed[s] + text[k] + rest[s, k] over blocks k of windows,
    see `Spread`. The text can only widen the interval over seeds. A single window gives no variance over text.

    Args:
        variant: seed -> (N,) mean loss of each validation window, in the order of the text.
        baseline: the same of the baseline.
        weights: (N,) targets of each window, all above 0.
        n_comparisons: size of the family. The probability that the family calls any identical configurations
            different is at most 1 - confidence.
        confidence: of the whole family.
    """
    seeds = sorted(variant.keys() & baseline.keys())
    if not seeds:
        return Comparison(Interval(math.nan, None, None, 0), None, "one seed", None, "No seed is common to both.")
    sides = [np.stack([side[seed] for seed in seeds]).astype(float) for side in (variant, baseline)]  # 2 x (S, N)
    assert sides[0].shape == sides[1].shape == (len(seeds), len(weights)) and np.min(weights) > 0
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = sides[0] - sides[1]
        mean = float((difference @ weights).mean() / np.sum(weights))
    no_interval = Interval(mean, None, None, len(seeds))
    if not np.isfinite(difference).all():
        return Comparison(no_interval, None, "diverged", None, _diverged_remark(seeds, *sides))
    if len(seeds) < 2:
        remark = "One seed is common to both, which tells nothing about the variance between seeds."
        return Comparison(no_interval, None, "one seed", None, remark)
    spread, alpha = Spread.of(difference, np.asarray(weights, float)), (1 - confidence) / n_comparisons
    half = spread.half_width(alpha)
    interval, p = Interval(mean, mean - half, mean + half, len(seeds)), min(1.0, n_comparisons * spread.p(abs(mean)))
    if abs(mean) > half:
        return Comparison(interval, p, "worse" if mean > 0 else "better", None, "")
    if difference.any():
        more, remark = spread.more_seeds(abs(mean), alpha)
    else:
        more, remark = None, "The losses of both are bitwise equal, which no number of seeds would change."
    return Comparison(interval, p, "not distinguishable", more, remark)


@dataclass(frozen=True)
class Spread:
    """Variance of the mean of differences (S, N).

    The half width of the interval is the root of t(S - 1)^2 seeds / S + t(K - 1)^2 text (Banerjee 1960, Sankhya 22,
    p. 357): each part with its own degrees of freedom. For any ratio of two true variances the coverage is at least the
    stated rate, because the distribution function of chi-square with one degree of freedom is concave. Here `text` is
    itself a difference: simulated intervals keep the rate with 20 blocks, and cover 94 instead of 95 % with four.

    Attributes:
        seeds: variance between the means of seeds; it contributes seeds / S to the variance of the overall mean.
        text: contribution of the choice of the text to the variance of the overall mean.
    """

    seeds: float
    text: float
    n_seeds: int
    n_blocks: int

    @classmethod
    def of(cls, difference: np.ndarray, weights: np.ndarray) -> "Spread":
        """Estimates both parts from differences (S, N) and weights (N,).

        With blocks of equal weight these are the mean squares of a two-way layout without replication:
        seeds = MS_seeds / K and text = max(MS_blocks - MS_rest, 0) / (S K). Blocks of unequal weight count by their
        weight, like clusters in the variance of a ratio.
        """
        starts = block_starts(weights)
        share = np.add.reduceat(weights, starts) / weights.sum()  # (K,)
        # (S, K), whose sums over K are the means of the seeds
        parts = np.add.reduceat(difference * weights, starts, axis=1) / weights.sum()
        means = parts.sum(1, keepdims=True)  # (S, 1)
        n_seeds, n_blocks = parts.shape
        seeds = float(means.var(ddof=1))
        if n_blocks == 1:
            return cls(seeds, 0.0, n_seeds, n_blocks)
        deviations = n_blocks * (parts - share * means)  # (S, K), each row sums to 0
        of_blocks = deviations.mean(0)  # (K,)
        total = np.sum(of_blocks**2) / (n_blocks - 1)
        rest = np.sum((deviations - of_blocks) ** 2) / ((n_seeds - 1) * (n_blocks - 1))
        return cls(seeds, max(0.0, float(total - rest / n_seeds) / n_blocks), n_seeds, n_blocks)

    def half_width(self, alpha: float) -> float:
        """Of the interval that misses the true difference with a probability of at most alpha."""
        by_seeds = student_quantile(self.n_seeds, alpha) * math.sqrt(self.seeds / self.n_seeds)
        return math.hypot(by_seeds, student_quantile(self.n_blocks, alpha) * math.sqrt(self.text))

    def p(self, mean: float) -> float:
        """The alpha for which 0 is an end of the interval around mean >= 0."""
        from scipy.optimize import brentq
        from scipy.special import stdtr

        variance = self.seeds / self.n_seeds + self.text
        if variance == 0 or mean == 0:
            return 1.0 if mean == 0 else 0.0
        of_seeds, of_text = (
            2 * float(stdtr(max(1, n - 1), -mean / math.sqrt(variance))) for n in (self.n_seeds, self.n_blocks)
        )
        if self.text == 0:
            return of_seeds
        low, high = max(min(of_seeds, of_text) / 2, MIN_P), min(max(of_seeds, of_text) * 2, 1.0)  # p is between the two
        if self.half_width(low) <= mean:
            return 0.0
        log_p = brentq(lambda log: self.half_width(math.exp(log)) - mean, math.log(low), math.log(high), xtol=1e-9)
        return math.exp(log_p)  # pyright: ignore[reportArgumentType] a float, since full_output is False

    def more_seeds(self, mean: float, alpha: float) -> tuple[int | None, str]:
        """How many more seeds detect a difference of mean >= 0 at level alpha with probability POWER; or why none."""
        from scipy.special import ndtr, ndtri

        text_quantile = student_quantile(self.n_blocks, alpha)
        if mean < (text_quantile + ndtri(POWER)) * math.sqrt(self.text):
            return None, "No number of seeds would settle it: so small a difference needs more validation text."
        if self.seeds + self.text == 0:
            return None, TOO_MANY

        def power(n: int) -> float:
            by_seeds = student_quantile(n, alpha) ** 2 * self.seeds * _variances(n) / n  # (NODES,)
            thresholds = np.sqrt(by_seeds + text_quantile**2 * self.text)
            return ndtr((mean - thresholds) / math.sqrt(self.seeds / n + self.text)).mean()

        enough = bisect.bisect_left(range(MAX_SEEDS + 1), POWER, lo=self.n_seeds + 1, key=power)
        return (enough - self.n_seeds, "") if enough <= MAX_SEEDS else (None, TOO_MANY)


def block_starts(weights: np.ndarray) -> np.ndarray:
    """First window of each of at most BLOCKS contiguous blocks of about equal weight; weights (N,) are above 0."""
    middles = (np.cumsum(weights) - weights / 2) / np.sum(weights)  # of each window, as shares of the text
    blocks = (middles * min(BLOCKS, len(weights))).astype(int)  # (N,), ascending
    return np.flatnonzero(np.diff(blocks, prepend=-1))


@functools.cache
def _variances(n: int) -> np.ndarray:
    """(NODES,) equally probable values of the sample variance of n observations whose variance is 1.

    The interval that a difference must exceed is itself estimated; its expected width alone would be too optimistic.
    """
    from scipy.special import gammaincinv

    return gammaincinv((n - 1) / 2, (np.arange(NODES) + 0.5) / NODES) / ((n - 1) / 2)


def _diverged_remark(seeds: Sequence[int], variant: np.ndarray, baseline: np.ndarray) -> str:
    """Names the runs whose losses (S, N) are not finite."""
    sides = []
    for name, losses in (("the variant", variant), ("the baseline", baseline)):
        bad = [str(seed) for seed, row in zip(seeds, losses, strict=True) if not np.isfinite(row).all()]
        if bad:
            sides.append(f"{name} with seed {', '.join(bad)}")
    return f"The loss of {' and of '.join(sides)} is not finite."
