"""One comparison of losses: variants with a baseline, paired by document and, on request, by seed.

A configuration is trained with some seeds and validated on one text, so its loss is uncertain in two ways: other seeds
give other weights, and another text of the same kind is easier or harder. Seeds and documents are crossed random
effects: the losses of two runs differ by d[s, g] = mean + seed[s] + text[g] + rest[s, g]. The effect of a document on
both always cancels. The effect of a seed cancels only where one seed does the same to both runs; else pairs of seeds
cost degrees of freedom and gain nothing.

Letters: V variants with the baseline, S seeds, G documents (or other clusters of the text).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tril.model.intervals import Interval, clustered_mean, t_quantile

BETTER, WORSE, EQUAL = "better", "worse", "equal within the margin"
UNCLEAR = "not distinguishable"
ONE_SEED, DIVERGED, ONE_DOCUMENT = "one seed", "diverged", "one document"  # no interval, so no statement
POWER = 0.8  # probability with which the smallest detectable difference is found
MAX_SEEDS = 1000  # of the search of `seeds_needed`
Variances = Sequence[tuple[float, float]]  # independent contributions to the variance of a mean, with their df


@dataclass(frozen=True)
class Comparison:
    """A variant compared with the baseline.

    Attributes:
        difference: variant - baseline, below 0 if the variant is better; n counts the seeds common to both. The
            intervals of all variants together hold the true differences with a probability of at least 1 - alpha.
            Without ends where there is no statement.
        verdict: BETTER, WORSE, EQUAL, UNCLEAR, or why there is no statement: ONE_SEED, DIVERGED, ONE_DOCUMENT.
        variances: contributions of the seeds and of the text to the variance of the mean; () without an interval.
    """

    difference: Interval
    verdict: str
    variances: Variances = ()

    @property
    def seeds(self) -> int:
        return self.difference.n

    @property
    def se(self) -> float | None:
        """Standard error of the difference; None without an interval."""
        return math.sqrt(sum(each for each, _ in self.variances)) if self.variances else None

    @property
    def df(self) -> float | None:
        """Its degrees of freedom; None without an interval."""
        return _joint_df(self.variances) if self.variances else None

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

    def seeds_needed(self, effect: float, level: float) -> int | None:
        """The seeds with which a true difference `effect` is found with probability POWER at this level, if the
        variances are as estimated. None: more than MAX_SEEDS, as where the text alone makes the difference uncertain.
        """
        from scipy.stats import nct

        (of_seeds, df), *of_text = self.variances

        def power(seeds: int) -> float:
            part = (of_seeds * self.seeds / seeds, df * (seeds - 1) / (self.seeds - 1))
            variances = [part, *of_text]
            se = math.sqrt(sum(each for each, _ in variances))
            return float(nct.sf(_half_width(variances, level) / se, _joint_df(variances), effect / se)) if se else 1.0

        seeds = 2 + bisect_left(range(2, MAX_SEEDS + 1), POWER, key=power)
        return seeds if seeds <= MAX_SEEDS else None


def compare(
    losses: np.ndarray,
    sizes: np.ndarray,
    alpha: float = 0.05,
    margin: float | None = None,
    *,
    of_models: bool = False,
    paired: bool = True,
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
        paired: compares runs of equal seeds; else the runs of both are independent. Only seeds that both have count.

    Returns:
        The comparisons of variants 1, 2, ..., V - 1.
    """
    assert losses.shape[0] >= 2 and losses.shape[2:] == sizes.shape and sizes.min() > 0, (losses.shape, sizes.shape)
    trained, level = np.logical_not(np.isnan(losses).all(-1)), alpha / (len(losses) - 1)  # (V, S)
    runs = [(losses[0][both], rows[both]) for rows, both in zip(losses[1:], trained[1:] & trained[0], strict=True)]
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = [of_variant - of_baseline for of_baseline, of_variant in runs]  # (S, G) each
    if of_models:
        means = [clustered_mean(each[0] * sizes, sizes) for each in differences]
        return [_concluded(x.mean, [(x.se**2, x.df)] * bool(x.df), level, margin, 1, ONE_DOCUMENT) for x in means]
    family = [(each,) for each in differences] if paired else runs
    by_seed = [[rows @ sizes / sizes.sum() for rows in each] for each in family]
    pooled = pooled_variance([each for each in by_seed if len(each[0]) > 1 and np.isfinite(each).all()])
    items = zip(differences, family, strict=True)
    return [_of_configurations(*each, sizes, level, margin, pooled) for each in items]


def pooled_variance(family: Sequence[Sequence[np.ndarray]]) -> tuple[float, float]:
    """The variance between seeds of the difference of two runs, averaged over all comparisons; its df.

    All comparisons share the baseline. Paired differences of equal variances then have the correlation 1/2, and the
    mean of k variances has 4 k / (k + 3) times the degrees of freedom of one (Satterthwaite), instead of k times. For
    independent runs, the same formula takes the variances as estimated (of one comparison: Welch's test). Both means
    are right for a baseline that varies more than the variants, unlike the residual variance of variant + seed.

    Args:
        family: for each comparison, the differences (S,), or the losses of baseline and variant, (S,) each; S >= 2.
    """
    k, df = len(family), sum(len(each[0]) - 1 for each in family)
    squares = [[float(np.var(rows)) * len(rows) for rows in each] for each in family]
    variance = sum(map(sum, squares)) / df if df else math.nan
    if not df or not variance or len(family[0]) == 1:
        return variance, 4 * df / (k + 3)
    of_baseline = sum(each for each, _ in squares) / df
    of_variants = [square / (len(rows) - 1) / k for (_, square), (_, rows) in zip(squares, family, strict=True)]
    return variance, df / k * variance**2 / (of_baseline**2 + sum(each**2 for each in of_variants))


def text_variance(mean: np.ndarray, family: Sequence[np.ndarray], sizes: np.ndarray) -> tuple[float, float]:
    """Contribution of the choice of the text to the variance of a mean difference (G,), and its degrees of freedom.

    The variance CR2 over documents of the difference, averaged over seeds, less what single runs contribute to it.

    Args:
        family: the differences, or the losses of baseline and variant: (S, G) each, S >= 2.
    """
    if len(sizes) < 2:
        return 0.0, math.inf
    share, of_runs = sizes / sizes.sum(), 0.0
    for rows in family:
        scores = share * (rows - (rows @ share)[:, None])  # (S, G), each row sums to 0
        of_runs += float(np.sum((scores - scores.mean(0)) ** 2 / (1 - share)) / (len(rows) - 1) / len(rows))
    total = clustered_mean(mean * sizes, sizes)
    return max(0.0, total.se**2 - of_runs), total.df


def _of_configurations(differences, family, sizes, level, margin, pooled) -> Comparison:
    """The comparison of pairs of runs with these differences (S, G), for other seeds and another text."""
    seeds, variances = len(differences), []
    with np.errstate(invalid="ignore"):  # inf - inf
        mean = float((differences @ sizes / sizes.sum()).mean()) if seeds else math.nan
    if seeds > 1 and math.isfinite(mean):
        own = sum(float(np.var(rows @ sizes / sizes.sum(), ddof=1)) for rows in family)
        text = text_variance(differences.mean(0), family, sizes)
        variances = [(max(own, pooled[0]) / seeds, pooled[1]), text]
    return _concluded(mean, variances, level, margin, seeds, ONE_SEED)


def _concluded(
    mean: float, variances: Variances, level: float, margin: float | None, seeds: int, without: str
) -> Comparison:
    """The comparison with this mean; `without`: why a finite one has no variances."""
    if not variances:
        return Comparison(Interval(mean, None, None, seeds), without if math.isfinite(mean) or not seeds else DIVERGED)
    half = _half_width(variances, level)
    if margin is not None and abs(mean) + half < margin:
        verdict = EQUAL
    elif abs(mean) <= half:
        verdict = UNCLEAR
    else:
        verdict = BETTER if mean < 0 else WORSE
    return Comparison(Interval(mean, mean - half, mean + half, seeds), verdict, tuple(variances))


def _half_width(variances: Variances, level: float) -> float:
    """Half the width of an interval.

    Each part has its own degrees of freedom: for any ratio of the true variances, the coverage is at least 1 - level
    (Banerjee 1960, Sankhya 22, p. 357).
    """
    return math.hypot(*(t_quantile(df, level) * math.sqrt(each) for each, df in variances if each))


def _joint_df(variances: Variances) -> float:
    """Satterthwaite's degrees of freedom of the sum."""
    squares = sum(each**2 / df for each, df in variances)
    return sum(each for each, _ in variances) ** 2 / squares if squares else math.inf
