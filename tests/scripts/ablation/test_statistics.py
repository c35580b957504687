"""Intervals and comparisons, tested against hand computation, scipy's t test and a two-way analysis of variance."""

import math

import numpy as np
import pytest
from scipy import stats

from tril.model.intervals import Interval, mean_interval
from tril.scripts.ablation.statistics import BLOCKS, MAX_SEEDS, Spread, block_starts, compare

ZERO = np.zeros(4)


def pair(differences: np.ndarray) -> tuple[dict, dict]:
    """A variant and a baseline whose losses differ by `differences` (S, N)."""
    baseline = {seed: 3 + 0.25 * np.arange(len(row)) + seed for seed, row in enumerate(differences)}
    return {seed: baseline[seed] + row for seed, row in enumerate(differences)}, baseline


def test_interval_is_that_of_students_t():
    # Half of it is t(0.975, 1) = 12.7062 times the standard error 1 / 2, from tables
    found = mean_interval([1.0, 2.0])
    assert (found.mean, found.n) == (1.5, 2) and [found.low, found.high] == pytest.approx(
        [1.5 - 6.3531, 1.5 + 6.3531], abs=1e-4
    )
    values = [3.1, 2.9, 3.3, 3.05]
    for confidence in (0.5, 0.95, 0.999):
        low, high = stats.ttest_1samp(values, 0).confidence_interval(confidence)
        found = mean_interval(values, confidence)
        assert [found.low, found.high] == pytest.approx([low, high], rel=1e-12)


def test_one_seed_and_losses_that_are_not_finite_give_no_interval():
    assert mean_interval([2.5]) == Interval(2.5, None, None, 1)
    assert math.isnan(mean_interval([]).mean)
    assert mean_interval([1.0, math.inf]) == Interval(math.inf, None, None, 2)
    for values in ([1.0, math.nan, 2.0], [math.inf, -math.inf, 1.0]):
        found = mean_interval(values)
        assert math.isnan(found.mean) and (found.low, found.high, found.n) == (None, None, 3)


def test_a_comparison_by_hand():
    # Means of seeds 2 and 6, of windows 2 and 6, overall 4; the residuals are 1, -1, -1, 1. So the mean squares are
    # 16, 16 and 4, and the variance of the mean is (16 + 16 - 4) / 4.
    found = compare(*pair(np.array([[1.0, 3.0], [3.0, 9.0]])), np.array([32, 32]), n_comparisons=1)
    half = 12.7062 * math.sqrt(7)
    assert (found.difference.mean, found.difference.n) == (4.0, 2)
    assert [found.difference.low, found.difference.high] == pytest.approx([4 - half, 4 + half], abs=1e-3)
    assert found.verdict == "not distinguishable" and found.unit == "nats per token"
    assert found.p == pytest.approx(
        1 - 2 / math.pi * math.atan(4 / math.sqrt(7))
    )  # t with one degree of freedom is Cauchy's distribution


@pytest.mark.parametrize("shift", [1.5, 20])
@pytest.mark.parametrize("text", [0.0, 1.0])
def test_interval_and_p_are_those_of_the_mean_squares(text, shift):
    generator = np.random.default_rng(1)
    windows = generator.normal(size=(4, 1)) + text * generator.normal(size=(1, 60)) + generator.normal(size=(4, 60))
    d = windows.reshape(4, BLOCKS, 3).mean(2)  # (S, K)
    n_seeds, n_blocks = d.shape
    seeds, blocks, mean = d.mean(1), d.mean(0), d.mean()
    ms_seeds = n_blocks * sum((seeds - mean) ** 2) / (n_seeds - 1)
    ms_blocks = n_seeds * sum((blocks - mean) ** 2) / (n_blocks - 1)
    rest = [d[s, k] - seeds[s] - blocks[k] + mean for s in range(n_seeds) for k in range(n_blocks)]
    ms_rest = sum(np.square(rest)) / ((n_seeds - 1) * (n_blocks - 1))
    assert (ms_blocks > ms_rest) == bool(text)

    def half(alpha: float) -> float:
        by_seeds, by_text = stats.t.ppf(1 - alpha / 2, n_seeds - 1) ** 2, stats.t.ppf(1 - alpha / 2, n_blocks - 1) ** 2
        return math.sqrt((by_seeds * ms_seeds + by_text * max(0, ms_blocks - ms_rest)) / (n_seeds * n_blocks))

    found = compare(*pair(windows + shift), np.full(60, 32), n_comparisons=5)
    assert found.difference.mean == pytest.approx(mean + shift)
    assert found.difference.high - found.difference.mean == pytest.approx(half(0.05 / 5))
    assert half(found.p / 5) == pytest.approx(abs(mean + shift))
    assert (found.p < 0.05) == (found.verdict == "worse") == (shift == 20)


def test_windows_are_weighted_by_their_targets():
    generator = np.random.default_rng(2)
    variant, baseline = pair(generator.normal(size=(3, 33)))
    weights = np.array([32] * 32 + [5])
    losses = [
        np.mean([np.sum(side[seed] * weights) / np.sum(weights) for seed in side]) for side in (variant, baseline)
    ]
    assert compare(variant, baseline, weights, n_comparisons=1).difference.mean == pytest.approx(
        losses[0] - losses[1], rel=1e-12
    )


def test_variance_over_text_of_unequal_windows():
    """Without seeds, the variance of a weighted mean of independent windows is the sum of their squared shares.

    Each of 2000 estimates is within about a third, so their mean is within 1 %; the method neglects the squared shares,
    at most 10 %.
    """
    generator = np.random.default_rng(3)
    weights = np.array([1.0, 3.0] * 10)
    quantile = stats.t.ppf(0.975, 19)
    differences = (
        compare(*pair(np.tile(generator.normal(size=20), (2, 1))), weights, n_comparisons=1).difference
        for _ in range(2000)
    )
    variance = np.mean([((interval.high - interval.mean) / quantile) ** 2 for interval in differences])
    assert variance == pytest.approx(np.sum((weights / weights.sum()) ** 2), rel=0.1)


def test_blocks_are_contiguous_and_about_equal():
    assert block_starts(np.full(7, 32)).tolist() == list(range(7))
    assert block_starts(np.full(BLOCKS * 3, 32)).tolist() == list(range(0, BLOCKS * 3, 3))
    weights = np.random.default_rng(0).integers(1, 33, size=1000)
    starts = block_starts(weights)
    sums = np.add.reduceat(weights, starts)
    assert starts[0] == 0 and len(starts) == BLOCKS and abs(sums - weights.sum() / BLOCKS).max() <= 32
    assert block_starts(np.array([1.0, 1.0, 1000.0])).tolist() == [0, 2]


def test_only_common_seeds_count():
    variant, baseline = pair(np.array([[0.1, 0.2], [0.3, 0.1], [9.0, 9.0]]))
    expected = compare({0: variant[0], 1: variant[1]}, {0: baseline[0], 1: baseline[1]}, np.ones(2), n_comparisons=1)
    assert (
        compare(variant, {7: ZERO[:2]} | {seed: baseline[seed] for seed in (1, 0)}, np.ones(2), n_comparisons=1)
        == expected
    )


def test_fewer_than_two_common_seeds_allow_no_statement():
    one = compare({0: ZERO + 3, 1: ZERO}, {0: ZERO + 1}, np.ones(4), n_comparisons=1)
    assert (one.difference, one.p, one.verdict, one.more_seeds) == (
        Interval(2.0, None, None, 1),
        None,
        "one seed",
        None,
    )
    none = compare({0: ZERO}, {1: ZERO}, np.ones(4), n_comparisons=1)
    assert (none.difference.n, none.p, none.verdict, none.remark) == (0, None, "one seed", "No seed is common to both.")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_diverged_run_is_named_and_not_averaged(value):
    variant, baseline = pair(np.zeros((3, 4)))
    variant[1] = np.array([3.0, value, 3.0, 3.0])
    found = compare(variant, baseline, np.ones(4), n_comparisons=2)
    assert (found.verdict, found.p, found.more_seeds, found.difference.low, found.difference.n) == (
        "diverged",
        None,
        None,
        None,
        3,
    )
    assert (
        not math.isfinite(found.difference.mean)
        and found.remark == "The loss of the variant with seed 1 is not finite."
    )
    baseline[2] = np.full(4, value)
    found = compare(variant, baseline, np.ones(4), n_comparisons=2)
    assert found.remark == "The loss of the variant with seed 1 and of the baseline with seed 2 is not finite."


@pytest.mark.filterwarnings("error")
def test_bitwise_equal_losses_are_not_distinguishable():
    _, baseline = pair(np.zeros((3, 50)))
    found = compare(baseline, baseline, np.ones(50), n_comparisons=3)
    assert (found.difference, found.p, found.verdict, found.more_seeds) == (
        Interval(0.0, 0.0, 0.0, 3),
        1.0,
        "not distinguishable",
        None,
    )
    assert found.remark == "The losses of both are bitwise equal, which no number of seeds would change."


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("difference, verdict", [(0.5, "worse"), (-0.5, "better")])
def test_difference_without_variance_is_certain(difference, verdict):
    found = compare(*pair(np.full((2, 4), difference)), np.ones(4), n_comparisons=3)
    assert (found.difference, found.p, found.verdict) == (Interval(difference, difference, difference, 2), 0.0, verdict)
    assert (found.more_seeds, found.remark) == (None, "")
    rounded = compare(
        *pair(np.full((2, 50), difference)), np.ones(50), n_comparisons=3
    )  # shares of 1 / 50 are not exact
    assert rounded.verdict == verdict and rounded.p < 1e-12
    assert [rounded.difference.low, rounded.difference.high] == pytest.approx([difference] * 2, abs=1e-12)


def test_p_value_too_small_for_a_float_is_0():
    assert Spread(seeds=1e-40, text=1e-40, n_seeds=60, n_blocks=60).p(1.0) == 0.0
    assert 0 < Spread(seeds=1e-20, text=1e-20, n_seeds=20, n_blocks=20).p(1.0) < 1e-150


@pytest.mark.filterwarnings("error")
def test_one_window_leaves_the_t_test_over_seeds():
    values = [0.1, -0.2, 0.4]
    found = compare(*pair(np.array(values)[:, None]), np.ones(1), n_comparisons=1)
    assert (found.difference.low, found.difference.high) == pytest.approx(
        stats.ttest_1samp(values, 0).confidence_interval(0.95)
    )
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def differences_with(mean: float, deviation: float, text: float = 0.0, n_seeds: int = 3) -> np.ndarray:
    """Differences (S, BLOCKS) with this mean, deviation between seeds, and variance of the mean from the text."""
    seeds = np.arange(n_seeds) - (n_seeds - 1) / 2
    blocks = np.tile([1.0, -1.0], BLOCKS // 2) * math.sqrt(text * (BLOCKS - 1))
    return mean + deviation * (seeds / seeds.std(ddof=1))[:, None] + blocks


def test_differences_that_no_number_of_seeds_settles():
    def more(mean: float, deviation: float, text: float, n_seeds: int = 3):
        found = compare(*pair(differences_with(mean, deviation, text, n_seeds)), np.ones(BLOCKS), n_comparisons=1)
        assert found.verdict == "not distinguishable"
        return found.more_seeds, found.remark

    # With infinitely many seeds the threshold is (2.093 + 0.842) times the deviation over text, from 20 blocks.
    by_text = None, "No number of seeds would settle it: so small a difference needs more validation text."
    assert more(2.92, 1.0, text=1.0) == by_text
    assert more(2.95, 1.0, text=1.0) != by_text
    too_many = None, f"More than {MAX_SEEDS} seeds would be needed."
    # 100 seeds: 0.8 = P(|t| > 1.984) at a noncentrality of 2.829, from scipy's noncentral t: 0.2829 deviations suffice.
    assert more(0.282, 1.0, text=0.0) == too_many
    assert more(0.284, 1.0, text=0.0) == (MAX_SEEDS - 3, "")
    assert more(0.01, 1.0, text=0.0, n_seeds=MAX_SEEDS) == too_many


@pytest.mark.parametrize("n_comparisons", [1, 5])
@pytest.mark.parametrize("mean", [0.5, 1.0, 1.2])
def test_more_seeds_by_the_noncentral_t(mean, n_comparisons):
    """Without variance over text, t is noncentral: the smallest number of seeds with a power of 0.8."""
    found = compare(*pair(differences_with(mean, 1.0)), np.ones(BLOCKS), n_comparisons=n_comparisons)
    n = 4
    while stats.nct.sf(stats.t.ppf(1 - 0.025 / n_comparisons, n - 1), n - 1, mean * math.sqrt(n)) < 0.8:
        n += 1
    assert (found.verdict, found.more_seeds) == ("not distinguishable", n - 3)
