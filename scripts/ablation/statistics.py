"""What losses over seeds and over text allow to conclude about the arms of a sweep.

A configuration is trained with some seeds and validated on one text, so its loss is uncertain in two ways: other seeds
give other weights, and another text of the same kind is easier or harder. Arms are compared with the baseline seed by
seed and cluster by cluster: what a seed or a cluster changes for both of them cancels. Seeds and text are crossed
random effects: d[s, g] = mean + seed[s] + text[g] + rest[s, g].

A arms, S seeds, G clusters of the text (documents, or blocks of windows).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tril.model.intervals import Interval
from tril.scripts.ablation.detection import POWER as POWER  # reports state it
from tril.scripts.ablation.detection import Design, more_seeds, smallest_detectable
from tril.scripts.ablation.variances import Noise, SeedVariance, text_variance

EQUAL = "equal within the margin"
POOLED, SEPARATE = "pooled variance, Dunnett", "separate variances, Bonferroni"
Arm = Mapping[int, np.ndarray]  # seed -> (G,) mean loss of each cluster


@dataclass(frozen=True)
class Comparison:
    """A variant compared with the baseline.

    Attributes:
        difference: variant - baseline, with its interval. The intervals of the family contain all true differences
            with a probability of at least 1 - alpha.
        p: two-sided, corrected for the number of comparisons; None without an interval. Below alpha if and only if the
            interval excludes 0.
        verdict: "better" (a lower loss), "worse", "not distinguishable", "equal within the margin", "one seed" (fewer
            than 2 common seeds: no statement), "diverged" (a loss that is not finite: no statement) or "preliminary"
            (the stage has unfinished runs: no statement).
        more_seeds: for "not distinguishable", how many more seeds settle it in the next stage with probability POWER if
            variance and difference stay as observed; None if no number up to MAX_SEEDS does (the remark says why).
        remark: sentences; may be empty.
        unit: of the difference.
        method: how variance between seeds and several comparisons are treated; "" without an interval.
        df: degrees of freedom of the variance between seeds; 0 without an interval.
        detectable: the true difference that this design finds with probability POWER, if the variances are as
            estimated; None without an interval.
        alpha: family error rate of this stage.
        stage: number of the stage, from 1.
        n_clusters: documents or blocks of windows; 0 if the text was compared as a whole.
        effective_clusters: number of clusters of equal size with the same variance of the mean.
        clusters: what a cluster is, "documents" or "blocks of windows"; "" if the text was compared as a whole.
        p_equal: p of the two one-sided tests, corrected; None without a margin or an interval.
        margin: of "equal within the margin"; None: not tested.
        noise: variances behind the interval; None without an interval.
    """

    difference: Interval
    p: float | None
    verdict: str
    more_seeds: int | None
    remark: str
    unit: str = "nats per token"
    method: str = ""
    df: float = 0.0
    detectable: float | None = None
    alpha: float = 0.05
    stage: int = 1
    n_clusters: int = 0
    effective_clusters: float = 0.0
    clusters: str = ""
    p_equal: float | None = None
    margin: float | None = None
    noise: Noise | None = None


def compare_arms(
    arms: Mapping[str, Arm],
    baseline: Arm,
    targets: np.ndarray,
    *,
    alpha: float,
    n_comparisons: int | None = None,
    margin: float | None = None,
) -> dict[str, Comparison]:
    """Compares each arm with the baseline over their common seeds; all comparisons form one family.

    The variance between seeds is pooled over the arms (or an arm's own variance, if that is larger), unless their
    variances differ; then each comparison has its own. Arms that diverged are not pooled.

    Args:
        arms: name -> arm, without the baseline.
        baseline: the losses of the baseline.
        targets: (G,) number of targets of each cluster, all above 0.
        alpha: the probability that the family calls any identical arms different is at most this.
        n_comparisons: size of the family; None: the number of arms.
        margin: a difference below it counts as none; two one-sided tests at alpha. None: no such test.

    Returns:
        Name -> comparison.
    """
    targets = np.asarray(targets, float)
    assert np.min(targets) > 0 and (margin is None or margin > 0)
    n_comparisons = n_comparisons or len(arms)
    noise = family_noise(arms, baseline, targets, n_comparisons)
    effective = float(targets.sum() ** 2 / (targets @ targets))
    found = {}
    for name, arm in arms.items():
        seeds, difference = differences(arm, baseline)
        fields = {"alpha": alpha, "margin": margin, "n_clusters": len(targets), "effective_clusters": effective}
        if name in noise:
            judged = _judge(difference, targets, noise[name], alpha, margin)
        else:
            judged = _without_interval(seeds, arm, baseline, difference, targets)
        found[name] = replace(judged, **fields)
    return found


def family_noise(arms: Mapping[str, Arm], baseline: Arm, targets: np.ndarray, n_comparisons: int) -> dict[str, Noise]:
    """The noise of each comparison that has an interval: two common seeds or more, and finite losses."""
    share = targets / targets.sum()
    tested = {name: differences(arm, baseline)[1] for name, arm in arms.items()}
    tested = {name: each for name, each in tested.items() if len(each) >= 2 and np.isfinite(each).all()}
    if not tested:
        return {}
    common = {name: arms[name].keys() & baseline.keys() for name in tested}
    of_baseline = set().union(*common.values())
    means = {name: {seed: float(arms[name][seed] @ share) for seed in common[name]} for name in tested}
    between = SeedVariance.of({**means, "": {seed: float(baseline[seed] @ share) for seed in of_baseline}})
    overlaps = [
        len(common[one] & common[other]) / 2 / math.sqrt(len(common[one]) * len(common[other]))
        for one, other in itertools.combinations(tested, 2)
    ]
    found = {}
    for name, difference in tested.items():
        own, df = float(np.var(difference @ share, ddof=1)), len(difference) - 1
        text, text_df = text_variance(difference, targets)
        if between.equal:
            seeds, df, correlation = max(2 * between.pooled, own), between.df, min(overlaps, default=0.5)
        else:
            seeds, correlation = own, None
        found[name] = Noise(seeds, df, len(difference), text, text_df, n_comparisons, correlation)
    return found


def differences(arm: Arm, baseline: Arm) -> tuple[list[int], np.ndarray]:
    """The common seeds, and variant - baseline for each of them, (S, G)."""
    seeds = sorted(arm.keys() & baseline.keys())
    if not seeds:
        return [], np.empty((0, 0))
    with np.errstate(invalid="ignore"):  # inf - inf
        return seeds, np.stack([np.asarray(arm[seed], float) - baseline[seed] for seed in seeds])


def _without_interval(
    seeds: Sequence[int], arm: Arm, baseline: Arm, difference: np.ndarray, targets: np.ndarray
) -> Comparison:
    if not seeds:
        return Comparison(Interval(math.nan, None, None, 0), None, "one seed", None, "No seed is common to both.")
    with np.errstate(invalid="ignore"):  # inf - inf
        mean = float((difference @ targets).mean() / targets.sum())
    interval = Interval(mean, None, None, len(seeds))
    if not np.isfinite(difference).all():
        return Comparison(interval, None, "diverged", None, _diverged_remark(seeds, arm, baseline))
    remark = "One seed is common to both, which tells nothing about the variance between seeds."
    return Comparison(interval, None, "one seed", None, remark)


def _judge(difference: np.ndarray, targets: np.ndarray, noise: Noise, alpha: float, margin: float | None) -> Comparison:
    """The comparison of differences (S, G)."""
    mean, half = float((difference @ targets).mean() / targets.sum()), noise.half_width(alpha)
    p_equal = None if margin is None else noise.p(margin - abs(mean)) / 2 if abs(mean) < margin else 1.0
    verdict, remark = ("worse" if mean > 0 else "better") if abs(mean) > half else "not distinguishable", ""
    if p_equal is not None and p_equal < alpha:
        remark = f"Also distinguishable from 0: {verdict}." if abs(mean) > half else ""
        verdict = EQUAL
    elif not difference.any():
        remark = "The losses of both are bitwise equal, which no number of seeds would change."
    return Comparison(
        Interval(mean, mean - half, mean + half, noise.n_seeds),
        noise.p(abs(mean)),
        verdict,
        None,
        remark,
        method=SEPARATE if noise.correlation is None else POOLED,
        df=noise.seed_df,
        p_equal=p_equal,
        noise=noise,
    )


def with_proposal(found: Comparison, next_alpha: float) -> Comparison:
    """Adds the smallest detectable difference and, where there is no verdict, the number of seeds that settles it.

    Args:
        found: a comparison, with or without an interval.
        next_alpha: the level at which more seeds would be tested.
    """
    if (noise := found.noise) is None:
        return found
    df_per_seed = noise.seed_df / (noise.n_seeds - 1)
    design = Design(noise.n_seeds, noise.n_comparisons, df_per_seed, noise.seeds, noise.text, noise.text_df)
    detectable = smallest_detectable(design, found.alpha)
    if found.verdict != "not distinguishable" or found.difference.mean == 0:
        return replace(found, detectable=detectable)
    more, reason = more_seeds(design, abs(found.difference.mean), next_alpha)
    seeds = f"{noise.n_seeds} seeds ({noise.seed_df:.3g} degrees of freedom)"
    limit = f"{seeds} find a difference of {detectable:.2g} with a probability of {POWER:.0%}."
    return replace(found, detectable=detectable, more_seeds=more, remark=" ".join(filter(None, [reason, limit])))


def _diverged_remark(seeds: Sequence[int], variant: Arm, baseline: Arm) -> str:
    """Names the runs whose losses are not finite."""
    sides = []
    for name, losses in (("the variant", variant), ("the baseline", baseline)):
        bad = [str(seed) for seed in seeds if not np.isfinite(losses[seed]).all()]
        if bad:
            sides.append(f"{name} with seed {', '.join(bad)}")
    return f"The loss of {' and of '.join(sides)} is not finite."
