"""Variances between seeds and over the text, against analyses of variance by hand; intervals and p values of both."""

import math

import numpy as np
import pytest
from scipy import stats

from tril.scripts.ablation.dunnett import critical_value
from tril.scripts.ablation.variances import Noise, SeedVariance, text_variance


def arms_of(losses: np.ndarray) -> dict[str, dict[int, float]]:
    """losses (A, S); NaN: no such run."""
    return {
        str(arm): {seed: float(x) for seed, x in enumerate(row) if not math.isnan(x)} for arm, row in enumerate(losses)
    }


def test_pooled_variance_is_the_residual_mean_square_of_two_ways():
    # The seeds of the arms differ by 2, 4 and 0, on average by 2, so the residuals are 0, 0; -1, 1; 1, -1
    found = SeedVariance.of(arms_of(np.array([[0.0, 2.0], [1.0, 5.0], [2.0, 2.0]])))
    assert (found.pooled, found.df) == (pytest.approx(4 / 2), 2)


def test_a_shift_of_all_arms_with_one_seed_changes_nothing():
    losses = np.random.default_rng(0).normal(size=(4, 3))
    shifted = SeedVariance.of(arms_of(losses + np.array([0.0, 5.0, -3.0]) + np.array([[1.0], [2.0], [0.0], [4.0]])))
    assert shifted.pooled == pytest.approx(SeedVariance.of(arms_of(losses)).pooled)


def test_two_arms_have_half_the_variance_of_their_difference():
    losses = np.random.default_rng(1).normal(size=(2, 5))
    found = SeedVariance.of(arms_of(losses))
    assert (found.pooled, found.df, found.equal) == (pytest.approx(np.var(losses[0] - losses[1], ddof=1) / 2), 4, True)


def test_missing_runs():
    """Without the run that a residual of 0 predicts, only the degrees of freedom change; one seed tells nothing."""
    losses = np.random.default_rng(2).normal(size=(3, 4))
    arms, seeds = np.indices(losses.shape)
    losses[2, 3] = math.nan
    there = ~np.isnan(losses)
    design = np.column_stack([arms[there][:, None] == range(3), seeds[there][:, None] == range(4)]).astype(float)
    residuals = losses[there] - design @ np.linalg.pinv(design) @ losses[there]
    found = SeedVariance.of(arms_of(losses))
    assert (found.pooled, found.df) == (pytest.approx(residuals @ residuals / 5), 5)
    with_one_seed = np.vstack([losses, [9.0, math.nan, math.nan, math.nan]])
    assert SeedVariance.of(arms_of(with_one_seed)).pooled == pytest.approx(found.pooled)


@pytest.mark.parametrize("losses", [np.empty((2, 0)), np.ones((3, 1)), np.ones((1, 5))])
def test_no_degrees_of_freedom(losses):
    found = SeedVariance.of(arms_of(losses))
    assert math.isnan(found.pooled) and found.df == 0 and not found.equal


@pytest.mark.filterwarnings("error")
def test_equal_variances_are_rejected_where_bartlett_rejects_them():
    losses = np.random.default_rng(0).normal(size=(5, 4))
    outcomes = set()
    for ratio in (1.0, 2.0, 4.0, 8.0):
        scaled = losses * np.array([[ratio], [1], [1], [1], [1]])
        centered = scaled - scaled.mean(0)
        p = stats.bartlett(*centered).pvalue
        assert SeedVariance.of(arms_of(scaled)).equal == (p >= 0.1)
        outcomes.add(bool(p >= 0.1))
    assert outcomes == {True, False}
    assert SeedVariance.of(arms_of(np.ones((3, 3)))).equal
    arm_that_mirrors_the_mean = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 2.0], [0.5, 0.5, 2.0]])
    assert not SeedVariance.of(arms_of(arm_that_mirrors_the_mean)).equal


def test_text_variance_of_equal_clusters_is_that_of_the_mean_squares():
    generator = np.random.default_rng(4)
    d = generator.normal(size=(4, 1)) + generator.normal(size=(1, 20)) + generator.normal(size=(4, 20))
    n_seeds, n_clusters = d.shape
    ms_clusters = n_seeds * np.var(d.mean(0), ddof=1)
    rest = d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()
    ms_rest = np.sum(rest**2) / ((n_seeds - 1) * (n_clusters - 1))
    variance, df = text_variance(d, np.full(20, 32.0))
    assert variance == pytest.approx((ms_clusters - ms_rest) / (n_seeds * n_clusters)) and df == pytest.approx(19)


def test_text_variance_of_unequal_clusters_is_unbiased():
    """2000 estimates of a variance of 1 for each cluster's mean, of sizes 1 and 3, with noise of the runs on top."""
    generator, targets = np.random.default_rng(5), np.array([1.0, 3.0] * 10)
    share = targets / targets.sum()
    noise = 2 * generator.normal(size=(2000, 3, 20)) / np.sqrt(targets)
    differences = generator.normal(size=(2000, 1, 20)) / np.sqrt(targets) + noise
    estimates = [text_variance(d, targets)[0] for d in differences]
    assert np.mean(estimates) == pytest.approx(np.sum(share**2 / targets), rel=0.12)
    assert text_variance(np.ones((3, 1)), np.ones(1)) == (0.0, math.inf)


CASES = [
    Noise(seeds=1.0, seed_df=10, n_seeds=3, text=text, text_df=12.5, n_comparisons=m, correlation=r)
    for text in (0.0, 0.2)
    for m, r in [(1, 0.5), (5, 0.5), (5, 0.3), (5, None)]
]


@pytest.mark.parametrize("noise", CASES, ids=str)
@pytest.mark.parametrize("alpha", [0.2, 0.05, 0.001])
def test_p_is_the_level_at_which_the_interval_ends_at_0(noise, alpha):
    half = noise.half_width(alpha)
    by_seeds = critical_value(alpha, noise.n_comparisons, 10, noise.correlation) if noise.correlation else None
    by_seeds = by_seeds or stats.t.isf(alpha / noise.n_comparisons / 2, 10)
    by_text = stats.t.isf(alpha / noise.n_comparisons / 2, 12.5)
    assert half == pytest.approx(math.sqrt(by_seeds**2 / 3 + by_text**2 * noise.text))
    assert noise.p(half) == pytest.approx(alpha, rel=1e-6)
    assert noise.p(0.0) == 1.0 and noise.p(1e-9) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.filterwarnings("error")
def test_p_of_extreme_cases():
    none = Noise(seeds=0.0, seed_df=4, n_seeds=3, text=0.0, text_df=9, n_comparisons=2, correlation=0.5)
    assert (none.p(1.0), none.p(0.0), none.half_width(0.05)) == (0.0, 1.0, 0.0)
    by_text = Noise(seeds=0.0, seed_df=4, n_seeds=3, text=1.0, text_df=9, n_comparisons=2, correlation=0.5)
    assert by_text.p(3.0) == pytest.approx(2 * 2 * stats.t.sf(3, 9))
    tiny = Noise(seeds=1e-40, seed_df=60, n_seeds=60, text=1e-40, text_df=60, n_comparisons=2, correlation=0.5)
    assert tiny.p(1.0) == 0.0
    small = Noise(seeds=1e-20, seed_df=20, n_seeds=20, text=1e-20, text_df=20, n_comparisons=2, correlation=0.5)
    assert 0 < small.p(1.0) < 1e-150
