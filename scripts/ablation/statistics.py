"""What losses over seeds and over text allow to be said.

A configuration is trained with some seeds and measured on one text, so its loss is uncertain twice: other seeds would give other weights,
and another text of the same kind would be easier or harder. Configurations are compared in pairs, seed by seed and window by window: what
a seed or a window does to both of them cancels.

S seeds, N validation windows, K blocks of windows.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tril.model.intervals import Interval, student_quantile

# Neighbouring windows often lie in one document, so they are no independent observations; long blocks of them nearly are. Fewer and longer
# blocks find more of the dependence, and the variance of the mean is known well enough from 10 to 30 of them (Schmeiser 1982, "Batch size
# effects in the analysis of simulation output").
BLOCKS = 20
POWER = 0.8  # chance with which the proposed number of seeds settles a comparison
SMALLEST = 1e-300  # p value that is told from 0
MOST_SEEDS = 100  # in all; more are not proposed
NODES = 100  # of the integral over what the spread between seeds may turn out to be
TOO_MANY = f"More than {MOST_SEEDS} seeds would be needed."


@dataclass(frozen=True)
class Comparison:
    """A variant beside the baseline.

    difference  variant - baseline, its interval at the family-wise confidence
    p           two-sided, corrected for the number of comparisons; None where there is no interval
    verdict     "better" (a lower loss), "worse", "not distinguishable", "one seed" (fewer than 2 in common: no statement), "diverged" (a
                loss that is not finite: no statement)
    more_seeds  of "not distinguishable": how many more seeds settle it with a chance of POWER, if spread and difference stay as seen;
                None: does not apply, or no number up to MOST_SEEDS would, and then the remark says why
    remark      sentences; may be empty
    unit        of the difference
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
    """The paired comparison over the seeds that both have, corrected for the number of comparisons by Bonferroni.

    variant, baseline  seed -> mean loss of each validation window (N,), windows in the order of the text
    weights            (N,) targets of each window, all above 0
    n_comparisons      size of the family: all of it together calls identical configurations different with a chance of at most
                       1 - confidence

    Seeds and text are taken as crossed random effects, d[s, k] = mean + seed[s] + text[k] + rest[s, k] over blocks k of windows, see
    `Spread`. The text can only widen the interval that seeds alone would give. One window tells nothing of the spread over text.
    """
    seeds = sorted(variant.keys() & baseline.keys())
    if not seeds:
        return Comparison(Interval(math.nan, None, None, 0), None, "one seed", None, "No seed is common to both.")
    sides = [np.stack([side[seed] for seed in seeds]).astype(float) for side in (variant, baseline)]  # 2 x (S, N)
    assert sides[0].shape == sides[1].shape == (len(seeds), len(weights)) and np.min(weights) > 0
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = sides[0] - sides[1]
        mean = float((difference @ weights).mean() / np.sum(weights))
    none = Interval(mean, None, None, len(seeds))
    if not np.isfinite(difference).all():
        return Comparison(none, None, "diverged", None, _not_finite(seeds, *sides))
    if len(seeds) < 2:
        return Comparison(
            none,
            None,
            "one seed",
            None,
            "One seed is common to both, which tells nothing about the spread between seeds.",
        )
    spread, alpha = Spread.of(difference, np.asarray(weights, float)), (1 - confidence) / n_comparisons
    half = spread.half_width(alpha)
    interval, p = Interval(mean, mean - half, mean + half, len(seeds)), min(1.0, n_comparisons * spread.p(abs(mean)))
    if abs(mean) > half:
        return Comparison(interval, p, "worse" if mean > 0 else "better", None, "")
    if difference.any():
        more, remark = spread.more_seeds(abs(mean), alpha)
    else:
        more, remark = None, "The losses of both are the same to the bit, which no number of seeds would change."
    return Comparison(interval, p, "not distinguishable", more, remark)


@dataclass(frozen=True)
class Spread:
    """How uncertain the mean of differences (S, N) is.

    seeds  variance between the means of seeds; of the mean of all it is the S-th part
    text   what the choice of the text adds to the variance of the mean of all

    Half of the interval is the root of t(S - 1)^2 seeds / S + t(K - 1)^2 text (Banerjee 1960, Sankhya 22, p. 357): each part by its own
    degrees of freedom. Whatever the ratio of two true variances, this covers at no less than the stated rate, because the distribution
    function of chi-square with one degree of freedom is concave. Here `text` is itself a difference: with 20 blocks simulated intervals
    keep the rate all the same, with four they cover 94 instead of 95 %.
    """

    seeds: float
    text: float
    n_seeds: int
    n_blocks: int

    @classmethod
    def of(cls, difference: np.ndarray, weights: np.ndarray) -> "Spread":
        """With blocks of equal weight, by the mean squares of a two-way layout without replication: seeds = MS_seeds / K and
        text = max(MS_blocks - MS_rest, 0) / (S K). With others each block counts by its weight, as a cluster does in a ratio's variance.
        """
        starts = block_starts(weights)
        share = np.add.reduceat(weights, starts) / weights.sum()  # (K,)
        parts = (
            np.add.reduceat(difference * weights, starts, axis=1) / weights.sum()
        )  # (S, K), in sum the means of the seeds
        means = parts.sum(1, keepdims=True)  # (S, 1)
        n_seeds, n_blocks = parts.shape
        seeds = float(means.var(ddof=1))
        if n_blocks == 1:
            return cls(seeds, 0.0, n_seeds, n_blocks)
        deviations = n_blocks * (parts - share * means)  # (S, K), each row in sum 0
        of_blocks = deviations.mean(0)  # (K,)
        total = np.sum(of_blocks**2) / (n_blocks - 1)
        rest = np.sum((deviations - of_blocks) ** 2) / ((n_seeds - 1) * (n_blocks - 1))
        return cls(seeds, max(0.0, float(total - rest / n_seeds) / n_blocks), n_seeds, n_blocks)

    def half_width(self, alpha: float) -> float:
        """Of the interval that leaves the truth out with a chance of at most alpha."""
        by_seeds = student_quantile(self.n_seeds, alpha) * math.sqrt(self.seeds / self.n_seeds)
        return math.hypot(by_seeds, student_quantile(self.n_blocks, alpha) * math.sqrt(self.text))

    def p(self, mean: float) -> float:
        """The alpha whose interval around mean >= 0 just reaches 0."""
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
        low, high = (
            max(min(of_seeds, of_text) / 2, SMALLEST),
            min(max(of_seeds, of_text) * 2, 1.0),
        )  # it lies between the two
        if self.half_width(low) <= mean:
            return 0.0
        return math.exp(
            brentq(lambda log: self.half_width(math.exp(log)) - mean, math.log(low), math.log(high), xtol=1e-9)
        )

    def more_seeds(self, mean: float, alpha: float) -> tuple[int | None, str]:
        """How many more seeds give a difference of mean >= 0 a chance of POWER to be found at level alpha, or why none do."""
        from scipy.special import ndtr, ndtri

        text_quantile = student_quantile(self.n_blocks, alpha)
        if mean < (text_quantile + ndtri(POWER)) * math.sqrt(self.text):
            return None, "No number of seeds would settle it: so small a difference needs more validation text."
        if self.seeds + self.text == 0:
            return None, TOO_MANY

        def power(n: int) -> float:
            thresholds = np.sqrt(
                student_quantile(n, alpha) ** 2 * self.seeds * _spreads(n) / n + text_quantile**2 * self.text
            )  # (NODES,)
            return ndtr((mean - thresholds) / math.sqrt(self.seeds / n + self.text)).mean()

        candidates = range(self.n_seeds + 1, MOST_SEEDS + 1)
        place = bisect.bisect_left(candidates, POWER, key=power)
        return (candidates[place] - self.n_seeds, "") if place < len(candidates) else (None, TOO_MANY)


def block_starts(weights: np.ndarray) -> np.ndarray:
    """First window of each of at most BLOCKS contiguous blocks of about equal weight, ascending; `weights` (N,) all above 0."""
    middles = (np.cumsum(weights) - weights / 2) / np.sum(weights)  # of each window, in shares of the text
    blocks = (middles * min(BLOCKS, len(weights))).astype(int)  # (N,), ascending
    return np.flatnonzero(np.diff(blocks, prepend=-1))


@functools.cache
def _spreads(n: int) -> np.ndarray:
    """Equally probable values of the variance that n observations show where it is 1 (NODES,).

    The interval that a difference must pass is itself estimated; its expected width alone would promise too much.
    """
    from scipy.special import gammaincinv

    return gammaincinv((n - 1) / 2, (np.arange(NODES) + 0.5) / NODES) / ((n - 1) / 2)


def _not_finite(seeds: Sequence[int], variant: np.ndarray, baseline: np.ndarray) -> str:
    """Which; losses (S, N)."""
    sides = []
    for name, losses in (("the variant", variant), ("the baseline", baseline)):
        bad = [str(seed) for seed, row in zip(seeds, losses) if not np.isfinite(row).all()]
        if bad:
            sides.append(f"{name} with seed {', '.join(bad)}")
    return f"The loss of {' and of '.join(sides)} is not finite."
