"""One comparison of losses: variants with a baseline, paired by seed and by document.

Whatever calls one loss lower than another asks `compare`: the report of a sweep, the effect of a removed head, two
evaluated checkpoints. It stands in `model`, because heads and evaluation may not import `scripts`.

A configuration is trained with some seeds and validated on one text, so its loss is uncertain in two ways: other seeds
give other weights, and another text of the same kind is easier or harder. Variants are compared seed by seed and
document by document, so what a seed or a document changes for both cancels. Seeds and documents are crossed random
effects: d[s, g] = mean + seed[s] + text[g] + rest[s, g].

Letters: V variants with the baseline, S seeds, G documents (or other clusters of the text).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tril.model.intervals import Interval, clustered_mean, t_quantile

BETTER, WORSE, EQUAL = "better", "worse", "equal within the margin"
UNCLEAR = "not distinguishable"
ONE_SEED, DIVERGED, ONE_DOCUMENT = "one seed", "diverged", "one document"  # no interval, so no statement
POWER = 0.8  # probability with which the smallest detectable difference is found


@dataclass(frozen=True)
class Comparison:
    """A variant compared with the baseline.

    Attributes:
        difference: variant - baseline, below 0 if the variant is better. The intervals of all variants together hold
            the true differences with a probability of at least 1 - alpha. Without ends where there is no statement.
        verdict: BETTER, WORSE, EQUAL, UNCLEAR, or why there is no statement: ONE_SEED, DIVERGED, ONE_DOCUMENT.
        seeds: common to both.
        se: standard error of the difference; None without an interval.
        df: its degrees of freedom; None without an interval.
    """

    difference: Interval
    verdict: str
    seeds: int
    se: float | None = None
    df: float | None = None

    @property
    def detectable(self) -> float | None:
        """The true difference that is found with probability POWER, if the variances are as estimated."""
        from scipy.optimize import brentq
        from scipy.stats import nct  # takes a second to import

        if not self.se or self.df is None:
            return self.se
        critical = self.difference.half_width / self.se
        effect = brentq(lambda effect: nct.sf(critical, self.df, effect) - POWER, 0, 3 * critical + 3)
        return self.se * float(effect)  # pyright: ignore[reportArgumentType] a float, since full_output is False


def compare(
    losses: np.ndarray, sizes: np.ndarray, alpha: float = 0.05, margin: float | None = None, *, of_models: bool = False
) -> list[Comparison]:
    """Compares each variant with the baseline over their common seeds; all comparisons form one family (Bonferroni).

    Args:
        losses: (V, S, G), V >= 2: mean loss of each document, of the baseline first. NaN in the whole row of a seed
            that a variant does not have; infinite in that of a run that diverged.
        sizes: (G,) targets (or bytes) of each document, all above 0. One document: the text counts as fixed.
        alpha: probability that any interval of the family misses its true difference.
        margin: a difference below it counts as none; None: nothing is called equal.
        of_models: the intervals are about these trained models (one seed) on other text; else about the
            configurations, for other seeds and other text.

    Returns:
        The comparisons of variants 1, 2, ..., V - 1.
    """
    assert losses.shape[0] >= 2 and losses.shape[2:] == sizes.shape and sizes.min() > 0, (losses.shape, sizes.shape)
    trained = np.logical_not(np.isnan(losses).all(-1))  # (V, S)
    pairs = trained[1:] & trained[0]
    with np.errstate(invalid="ignore"):  # inf - inf
        family = [rows[common] - losses[0][common] for rows, common in zip(losses[1:], pairs, strict=True)]
    level = alpha / len(family)
    if of_models:
        return [_of_models(difference[0], sizes, level, margin) for difference in family]
    tested = [each for each in family if len(each) > 1 and np.isfinite(each).all()]
    pooled = pooled_variance([each @ sizes / sizes.sum() for each in tested])
    return [_of_configurations(each, sizes, level, margin, pooled) for each in family]


def pooled_variance(by_seed: Sequence[np.ndarray]) -> tuple[float, float]:
    """The variance between seeds of a difference from the baseline, averaged over all differences; its df.

    All differences share the baseline, so with equal variances any two have the correlation 1/2, and the mean of k
    variances has 4 k / (k + 3) times the degrees of freedom of one (Satterthwaite), instead of k times. This mean is
    right for a baseline that varies more than the variants, unlike the residual variance of the layout variant + seed.

    Args:
        by_seed: for each variant, its differences (S,), S >= 2.
    """
    df = sum(len(each) - 1 for each in by_seed)
    squares = sum(float(np.var(each)) * len(each) for each in by_seed)
    return (squares / df, 4 * df / (len(by_seed) + 3)) if df else (math.nan, 0.0)


def text_variance(differences: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """Contribution of the choice of the text to the variance of a mean difference, and its degrees of freedom.

    The variance CR2 over documents of the difference, averaged over seeds, less what single runs contribute to it.

    Args:
        differences: (S, G), S >= 2.
    """
    n_seeds = len(differences)
    if len(sizes) < 2:
        return 0.0, math.inf
    share = sizes / sizes.sum()
    scores = share * (differences - (differences @ share)[:, None])  # (S, G), each row sums to 0
    rest = np.sum((scores - scores.mean(0)) ** 2 / (1 - share)) / (n_seeds - 1) / n_seeds
    total = clustered_mean(differences.mean(0) * sizes, sizes)
    return max(0.0, total.se**2 - float(rest)), total.df


def _of_configurations(
    differences: np.ndarray, sizes: np.ndarray, level: float, margin: float | None, pooled: tuple[float, float]
) -> Comparison:
    """The comparison of differences (S, G), for other seeds and another text."""
    seeds = len(differences)
    with np.errstate(invalid="ignore"):  # inf - inf
        by_seed = differences @ sizes / sizes.sum()  # (S,)
        mean = float(by_seed.mean()) if seeds else math.nan
    if seeds < 2 or not np.isfinite(by_seed).all():
        verdict = ONE_SEED if np.isfinite(by_seed).all() else DIVERGED
        return Comparison(Interval(mean, None, None, seeds), verdict, seeds)
    text, text_df = text_variance(differences, sizes)
    by_text = t_quantile(text_df, level) * math.sqrt(text) if text else 0.0
    # Each part has its own degrees of freedom. For any ratio of the true variances the coverage is at least the
    # stated rate (Banerjee 1960, Sankhya 22, p. 357).
    own, df = max(float(np.var(by_seed, ddof=1)), pooled[0]), pooled[1]
    half = math.hypot(t_quantile(df, level) * math.sqrt(own / seeds), by_text)
    return _concluded(mean, half, margin, seeds, [(own / seeds, df), (text, text_df)])


def _of_models(differences: np.ndarray, sizes: np.ndarray, level: float, margin: float | None) -> Comparison:
    """The comparison of differences (G,) of two trained models, for another text."""
    mean = clustered_mean(differences * sizes, sizes)
    if math.isnan(mean.se):
        verdict = ONE_DOCUMENT if math.isfinite(mean.mean) else DIVERGED
        return Comparison(Interval(mean.mean, None, None, 1), verdict, 1)
    return _concluded(mean.mean, t_quantile(mean.df, level) * mean.se, margin, 1, [(mean.se**2, mean.df)])


def _concluded(
    mean: float, half: float, margin: float | None, seeds: int, variances: Sequence[tuple[float, float]]
) -> Comparison:
    """A comparison with the interval mean +- half.

    Args:
        variances: independent contributions to the variance of the mean, each with its degrees of freedom.
    """
    if margin is not None and abs(mean) + half < margin:
        verdict = EQUAL
    elif abs(mean) <= half:
        verdict = UNCLEAR
    else:
        verdict = BETTER if mean < 0 else WORSE
    variance, squares = sum(each for each, _ in variances), sum(each**2 / df for each, df in variances)
    interval = Interval(mean, mean - half, mean + half, seeds)
    return Comparison(interval, verdict, seeds, math.sqrt(variance), variance**2 / squares if squares else math.inf)
