"""Variances of losses between seeds and over the text, and the interval of a difference from both.

A arms, S seeds, G clusters of the text (documents, or blocks of windows).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tril.model.intervals import clustered_mean, t_quantile
from tril.scripts.ablation.dunnett import critical_value, tail_probability

EQUAL_VARIANCES_LEVEL = 0.1  # liberal: pooling unequal variances is the larger error, see docs/ablations.md
MIN_P = 1e-300  # smaller p values count as 0


@dataclass(frozen=True)
class SeedVariance:
    """Variance of a run's loss between seeds, beyond what its seed changes for all arms alike.

    Attributes:
        pooled: residual mean square of the two-way layout arm + seed; NaN without degrees of freedom.
        df: its degrees of freedom, (A - 1)(S - 1) if every arm has every seed.
        residuals: of the runs of each arm with at least two seeds.
    """

    pooled: float
    df: int
    residuals: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, means: Mapping[str, Mapping[int, float]]) -> "SeedVariance":
        """Estimates it from the mean losses, arm -> seed -> loss; arms with one seed contribute nothing."""
        arms = [runs for runs in means.values() if len(runs) >= 2]
        seeds = sorted({seed for runs in arms for seed in runs})
        rows = [(arm, seeds.index(seed), loss) for arm, runs in enumerate(arms) for seed, loss in runs.items()]
        if not rows:
            return cls(math.nan, 0, ())
        arm_of, seed_of, losses = (np.array(column) for column in zip(*rows, strict=True))
        design = np.zeros((len(rows), len(arms) + len(seeds)))
        design[np.arange(len(rows)), arm_of] = design[np.arange(len(rows)), len(arms) + seed_of] = 1
        centered = losses - losses.mean()
        fit, _, rank, _ = np.linalg.lstsq(design, centered, rcond=None)
        residuals = centered - design @ fit
        residuals[np.abs(residuals) <= 1e-14 * np.abs(losses).max()] = 0  # rounding of losses that fit exactly
        df = len(rows) - int(rank)
        groups = tuple(residuals[arm_of == arm] for arm in range(len(arms)))
        return cls(float(residuals @ residuals) / df if df else math.nan, df, groups)

    @functools.cached_property
    def equal(self) -> bool:
        """Bartlett's test does not reject equal variances of the arms at EQUAL_VARIANCES_LEVEL.

        Two arms always have the same residuals, with opposite signs.
        """
        from scipy.stats import bartlett

        if self.df == 0 or len(self.residuals) < 3:
            return self.df > 0
        variances = [float(np.var(group, ddof=1)) for group in self.residuals]
        if min(variances) <= 1e-12 * max(variances):
            return max(variances) == 0
        return float(bartlett(*self.residuals).pvalue) >= EQUAL_VARIANCES_LEVEL


def text_variance(difference: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """Contribution of the choice of the text to the variance of a mean difference, and its degrees of freedom.

    The variance over clusters of the difference, averaged over seeds, by `clustered_mean`, less what single runs
    contribute to it: with clusters of equal size max(MS_clusters - MS_rest, 0) / (S G) of a two-way layout without
    replication. One cluster gives no variance.

    Args:
        difference: (S, G) differences of the mean losses of each cluster; S >= 2.
        targets: (G,) of each cluster, all above 0.
    """
    n_seeds, n_clusters = difference.shape
    if n_clusters < 2:
        return 0.0, math.inf
    share = targets / targets.sum()
    means = (difference @ share)[:, None]  # (S, 1)
    scores = share * (difference - means)  # (S, G), each row sums to 0
    of_clusters = scores.mean(0)  # (G,)
    rest = np.sum((scores - of_clusters) ** 2 / (1 - share)) / (n_seeds - 1) / n_seeds
    total = clustered_mean(difference.mean(0) * targets, targets)
    return max(0.0, total.se**2 - float(rest)), total.df


@dataclass(frozen=True)
class Noise:
    """What an interval of a difference depends on.

    The half width is the root of c^2 seeds / S + t^2 text (Banerjee 1960, Sankhya 22, p. 357): each part with its own
    degrees of freedom. For any ratio of two true variances the coverage is at least the stated rate, because the
    distribution function of chi-square with one degree of freedom is concave. So the text can only widen the interval.
    c is Dunnett's critical value if the variance between seeds is pooled, otherwise Student's t with Bonferroni's
    correction; t is Student's with Bonferroni's correction, because the text's variances are not pooled.

    Attributes:
        seeds: variance of the difference of one pair of runs with a common seed.
        seed_df: its degrees of freedom.
        n_seeds: S.
        text: contribution of the choice of the text to the variance of the mean difference.
        text_df: its degrees of freedom.
        n_comparisons: of the family.
        correlation: of any two differences between seeds, if `seeds` is pooled; None: it is not.
    """

    seeds: float
    seed_df: float
    n_seeds: int
    text: float
    text_df: float
    n_comparisons: int
    correlation: float | None

    def seed_quantile(self, alpha: float) -> float:
        if self.correlation is None:
            return t_quantile(self.seed_df, alpha / self.n_comparisons)
        return critical_value(alpha, self.n_comparisons, self.seed_df, self.correlation)

    def text_quantile(self, alpha: float) -> float:
        return t_quantile(self.text_df, alpha / self.n_comparisons)

    def half_width(self, alpha: float) -> float:
        """Of intervals that all contain the true differences with a probability of at least 1 - alpha."""
        by_seeds = self.seed_quantile(alpha) * math.sqrt(self.seeds / self.n_seeds)
        return math.hypot(by_seeds, self.text_quantile(alpha) * math.sqrt(self.text)) if self.text else by_seeds

    def p(self, mean: float) -> float:
        """The alpha for which 0 is an end of the interval around mean >= 0, at most 1."""
        from scipy.optimize import brentq

        seed_se, text_se = math.sqrt(self.seeds / self.n_seeds), math.sqrt(self.text)
        if mean == 0 or seed_se == text_se == 0:
            return 1.0 if mean == 0 else 0.0
        if text_se == 0:
            return self._seed_p(mean / seed_se)
        if seed_se == 0:
            return min(1.0, self.n_comparisons * _t_tail(mean / text_se, self.text_df))

        def excess(quantile: float) -> float:  # of the half width at the level where the seeds' quantile is `quantile`
            alpha = max(self._seed_p(quantile), MIN_P)
            return math.hypot(quantile * seed_se, self.text_quantile(alpha) * text_se) - mean

        if excess(0.0) >= 0:
            return 1.0
        quantile = brentq(excess, 0.0, mean / seed_se, xtol=1e-10)
        p = self._seed_p(quantile)  # pyright: ignore[reportArgumentType] a float, since full_output is False
        return p if p > MIN_P else 0.0

    def _seed_p(self, quantile: float) -> float:
        if self.correlation is None or self.n_comparisons == 1:
            return min(1.0, self.n_comparisons * _t_tail(quantile, self.seed_df))
        return tail_probability(quantile, self.n_comparisons, self.seed_df, self.correlation)


def _t_tail(t: float, df: float) -> float:
    """P(|T| > t)."""
    from scipy.special import stdtr

    return 2 * float(stdtr(df, -t))
