"""Comparisons of arms, tested against hand computation, Student's t and two-way analyses of variance."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tril.model.intervals import Interval
from tril.scripts.ablation.dunnett import critical_value
from tril.scripts.ablation.statistics import EQUAL, POOLED, SEPARATE, Comparison, compare_arms, with_proposal

ZERO = np.zeros(4)


def pair(differences: np.ndarray) -> tuple[dict, dict]:
    """A variant and a baseline whose losses differ by `differences` (S, G)."""
    baseline = {seed: 3 + 0.25 * np.arange(len(row)) + seed for seed, row in enumerate(differences)}
    return {seed: baseline[seed] + row for seed, row in enumerate(differences)}, baseline


def compare(variant, baseline, targets=None, *, alpha=0.05, **options) -> Comparison:
    targets = np.ones(len(next(iter(baseline.values())))) if targets is None else targets
    return compare_arms({"variant": variant}, baseline, targets, alpha=alpha, **options)["variant"]


def seeds_alone(losses: np.ndarray) -> list[dict]:
    """The arms of losses (A, S) of the whole text."""
    return [{seed: np.array([loss]) for seed, loss in enumerate(row)} for row in losses]


def test_a_comparison_by_hand():
    # Means of seeds 2 and 6, of clusters 2 and 6, overall 4; the residuals are 1, -1, -1, 1. So the mean squares are
    # 16, 16 and 4, and the variance of the mean is (16 + 16 - 4) / 4.
    found = compare(*pair(np.array([[1.0, 3.0], [3.0, 9.0]])), np.array([32, 32]))
    half = 12.7062 * math.sqrt(7)
    assert (found.difference.mean, found.difference.n) == (pytest.approx(4), 2)
    assert [found.difference.low, found.difference.high] == pytest.approx([4 - half, 4 + half], abs=1e-3)
    assert (found.verdict, found.unit, found.df, found.n_clusters) == ("not distinguishable", "nats per token", 1, 2)
    assert found.p == pytest.approx(
        1 - 2 / math.pi * math.atan(4 / math.sqrt(7))
    )  # t with one degree of freedom is Cauchy's distribution


def test_one_cluster_and_one_arm_leave_the_paired_t_test():
    values = np.array([0.1, -0.2, 0.4])
    found = compare(*pair(values[:, None]))
    expected = stats.ttest_1samp(values, 0)
    assert (found.difference.low, found.difference.high) == pytest.approx(expected.confidence_interval(0.95))
    assert found.p == pytest.approx(expected.pvalue)


def test_variance_is_pooled_over_all_arms():
    losses = np.random.default_rng(0).normal(size=(4, 3)) + np.array([0.0, 5.0, 0.0])
    baseline, *arms = seeds_alone(losses)
    residuals = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    pooled = 2 * np.sum(residuals**2) / 6
    found = compare_arms(dict(zip("abc", arms, strict=True)), baseline, np.ones(1), alpha=0.03)
    own_is_larger = 0
    for name, arm in zip("abc", losses[1:], strict=True):
        own = np.var(arm - losses[0], ddof=1)
        own_is_larger += own > pooled
        half = critical_value(0.03, 3, 6) * math.sqrt(max(pooled, own) / 3)
        interval = found[name].difference
        assert interval.mean == pytest.approx(arm.mean() - losses[0].mean())
        assert interval.high - interval.mean == pytest.approx(half)
        assert (found[name].df, found[name].method, found[name].alpha) == (6, POOLED, 0.03)
    assert own_is_larger == 1


def test_unequal_variances_are_not_pooled():
    losses = np.random.default_rng(1).normal(size=(4, 6)) * np.array([[1.0], [1.0], [30.0], [1.0]])
    baseline, *arms = seeds_alone(losses)
    found = compare_arms(dict(zip("abc", arms, strict=True)), baseline, np.ones(1), alpha=0.05)
    for name, arm in zip("abc", losses[1:], strict=True):
        expected = stats.ttest_1samp(arm - losses[0], 0)
        assert (found[name].method, found[name].df) == (SEPARATE, 5)
        assert found[name].p == pytest.approx(min(1, 3 * expected.pvalue))
        interval = expected.confidence_interval(1 - 0.05 / 3)
        assert [found[name].difference.low, found[name].difference.high] == pytest.approx(list(interval))


def test_interval_p_and_verdict_agree():
    generator, verdicts = np.random.default_rng(2), set()
    for shift in (0.0, 0.5, 1.0, 2.0, -3.0):
        baseline, *arms = (dict(enumerate(arm)) for arm in generator.normal(size=(4, 3, 15)) + 0.3 * shift)
        arms[0] = {seed: losses + shift for seed, losses in arms[0].items()}
        for found in compare_arms(dict(zip("abc", arms, strict=True)), baseline, np.ones(15), alpha=0.05).values():
            excluded = found.difference.low > 0 or found.difference.high < 0
            assert excluded == (found.p < 0.05) == (found.verdict in ("better", "worse"))
            assert found.verdict != "worse" or found.difference.mean > 0
            verdicts.add(found.verdict)
    assert verdicts == {"better", "worse", "not distinguishable"}


def test_clusters_are_weighted_by_their_targets():
    generator = np.random.default_rng(2)
    variant, baseline = pair(generator.normal(size=(3, 33)))
    weights = np.array([32] * 32 + [5])
    losses = [
        np.mean([np.sum(side[seed] * weights) / np.sum(weights) for seed in side]) for side in (variant, baseline)
    ]
    found = compare(variant, baseline, weights)
    assert found.difference.mean == pytest.approx(losses[0] - losses[1], rel=1e-12)
    assert found.effective_clusters == pytest.approx(np.sum(weights) ** 2 / np.sum(weights**2))


def test_only_common_seeds_count():
    variant, baseline = pair(np.array([[0.1, 0.2], [0.3, 0.1], [9.0, 9.0]]))
    expected = compare({0: variant[0], 1: variant[1]}, {0: baseline[0], 1: baseline[1]})
    assert compare(variant, {7: ZERO[:2]} | {seed: baseline[seed] for seed in (1, 0)}) == expected


def test_arms_with_different_seeds_share_a_variance():
    losses = np.random.default_rng(3).normal(size=(3, 4))
    baseline, first, second = seeds_alone(losses)
    del first[3], second[0]
    found = compare_arms({"first": first, "second": second}, baseline, np.ones(1), alpha=0.05)
    assert (found["first"].df, found["second"].df, found["first"].difference.n) == (10 - 6, 10 - 6, 3)
    assert found["first"].noise.correlation == pytest.approx(2 / 2 / 3)  # two of three seeds in common


def test_fewer_than_two_common_seeds_allow_no_statement():
    one = compare({0: ZERO + 3, 1: ZERO}, {0: ZERO + 1})
    assert (one.difference, one.p, one.verdict, one.more_seeds, one.noise) == (
        Interval(2.0, None, None, 1),
        None,
        "one seed",
        None,
        None,
    )
    none = compare({0: ZERO}, {1: ZERO})
    assert (none.difference.n, none.p, none.verdict, none.remark) == (0, None, "one seed", "No seed is common to both.")
    assert with_proposal(none, 0.01) == none


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_diverged_run_is_named_and_not_averaged(value):
    variant, baseline = pair(np.zeros((3, 4)))
    variant[1] = np.array([3.0, value, 3.0, 3.0])
    found = compare(variant, baseline)
    assert (found.verdict, found.p, found.difference.low, found.difference.n) == ("diverged", None, None, 3)
    assert (
        not math.isfinite(found.difference.mean)
        and found.remark == "The loss of the variant with seed 1 is not finite."
    )
    baseline[2] = np.full(4, value)
    found = compare(variant, baseline)
    assert found.remark == "The loss of the variant with seed 1 and of the baseline with seed 2 is not finite."


def test_diverged_and_single_arms_leave_the_others_as_they_are():
    baseline, first, second, third, fourth = seeds_alone(np.random.default_rng(4).normal(size=(5, 3)))
    diverged, single = third | {1: np.array([math.nan])}, {0: fourth[0]}
    arms = {"a": first, "b": second}
    alone = compare_arms(arms, baseline, np.ones(1), alpha=0.05, n_comparisons=4)
    found = compare_arms(arms | {"c": diverged, "d": single}, baseline, np.ones(1), alpha=0.05)
    assert {name: found[name] for name in "ab"} == alone
    assert (found["c"].verdict, found["d"].verdict) == ("diverged", "one seed")


@pytest.mark.filterwarnings("error")
def test_bitwise_equal_losses_are_not_distinguishable():
    _, baseline = pair(np.zeros((3, 50)))
    found = compare(baseline, baseline)
    assert (found.difference, found.p, found.verdict, found.more_seeds) == (
        Interval(0.0, 0.0, 0.0, 3),
        1.0,
        "not distinguishable",
        None,
    )
    remark = "The losses of both are bitwise equal, which no number of seeds would change."
    assert found.remark == with_proposal(found, 0.01).remark == remark
    assert compare(baseline, baseline, margin=0.01).verdict == EQUAL


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("difference, verdict", [(0.5, "worse"), (-0.5, "better")])
def test_difference_without_variance_is_certain(difference, verdict):
    found = compare(*pair(np.full((2, 4), difference)))
    assert (found.difference, found.p, found.verdict) == (Interval(difference, difference, difference, 2), 0.0, verdict)
    assert (found.more_seeds, found.remark) == (None, "")
    rounded = compare(*pair(np.full((2, 50), difference)))  # shares of 1 / 50 are not exact
    assert rounded.verdict == verdict and rounded.p < 1e-12
    assert [rounded.difference.low, rounded.difference.high] == pytest.approx([difference] * 2, abs=1e-12)


@pytest.mark.parametrize("margin", [0.2, 0.5, 0.9])
def test_equality_is_two_one_sided_tests(margin):
    values = np.array([0.1, -0.2, 0.15, 0.05, -0.05])
    found = compare(*pair(values[:, None]), alpha=0.01, margin=margin)
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    assert found.p_equal == pytest.approx(max(below, above))
    assert (found.verdict == EQUAL) == (found.p_equal < 0.01) == (margin > 0.2)
    assert (found.margin, found.p) == (margin, compare(*pair(values[:, None])).p)


def test_a_small_difference_may_be_found_and_be_equal_within_the_margin():
    values = np.array([0.11, 0.10, 0.09])
    assert compare(*pair(values[:, None])).verdict == "worse"
    both = compare(*pair(values[:, None]), margin=0.5)
    assert (both.verdict, both.remark) == (EQUAL, "Also distinguishable from 0: worse.")
    beyond = compare(*pair(values[:, None]), margin=0.05)
    assert (beyond.verdict, beyond.p_equal) == ("worse", 1.0)


def test_proposal_states_what_the_seeds_are_worth():
    found = compare(*pair(np.array([[0.1], [-0.2], [0.4]])))
    proposed = with_proposal(found, 0.005)
    assert proposed == replace(
        found, detectable=proposed.detectable, more_seeds=proposed.more_seeds, remark=proposed.remark
    )
    size = f"{proposed.detectable:.2g}"
    assert proposed.remark.endswith(
        f"3 seeds (2 degrees of freedom) find a difference of {size} with a probability of 80%."
    )
    certain = with_proposal(compare(*pair(np.array([[1.1], [1.2], [1.4]]))), 0.005)
    assert (certain.more_seeds, certain.remark) == (None, "") and certain.detectable > 0
