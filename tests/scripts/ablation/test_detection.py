"""Power, smallest detectable differences and proposed numbers of seeds, against the noncentral t and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from tril.scripts.ablation.detection import (
    MAX_SEEDS,
    MORE_TEXT,
    POWER,
    TOO_MANY,
    Design,
    more_seeds,
    smallest_detectable,
)
from tril.scripts.ablation.dunnett import critical_value


def separate(n_seeds: int = 3, n_comparisons: int = 1, **noise) -> Design:
    return Design(n_seeds, n_comparisons, df_per_seed=1, seeds=1.0, **noise)


@pytest.mark.parametrize("n_seeds, n_comparisons, difference", [(3, 1, 2.0), (5, 4, 1.5), (20, 1, 0.5)])
def test_power_of_separate_variances_is_that_of_the_noncentral_t(n_seeds, n_comparisons, difference):
    critical = stats.t.isf(0.025 / n_comparisons, n_seeds - 1)
    expected = stats.nct.sf(critical, n_seeds - 1, difference * math.sqrt(n_seeds))
    assert separate(n_seeds, n_comparisons).power(difference, 0.05) == pytest.approx(expected, abs=0.01)


def test_power_with_known_variance_of_the_text_is_normal():
    design = Design(3, 1, df_per_seed=1, seeds=0.0, text=1.0)
    assert design.power(2.0, 0.05) == pytest.approx(stats.norm.sf(1.959964 - 2.0), abs=1e-6)


@pytest.mark.parametrize("n_arms, n_seeds, difference", [(6, 3, 3.0), (3, 2, 6.0), (4, 4, 2.0)])
def test_power_of_pooled_variances_is_that_of_the_rule_for_them(n_arms, n_seeds, difference):
    """The larger of the pooled and of the own variance in nine of ten sweeps, separate variances in the tenth."""
    n, alpha = 20_000, 0.04
    losses = np.random.default_rng(0).normal(size=(n, n_arms, n_seeds))
    differences = losses[:, 1] + difference - losses[:, 0]
    residuals = (
        losses - losses.mean(1, keepdims=True) - losses.mean(2, keepdims=True) + losses.mean((1, 2), keepdims=True)
    )
    df = (n_arms - 1) * (n_seeds - 1)
    pooled, own = 2 * (residuals**2).sum((1, 2)) / df, differences.var(1, ddof=1)
    t = [differences.mean(1) / np.sqrt(variance / n_seeds) for variance in (np.maximum(pooled, own), own)]
    found = (
        np.mean(t[0] > critical_value(alpha, n_arms - 1, df)),
        np.mean(t[1] > stats.t.isf(alpha / (n_arms - 1) / 2, n_seeds - 1)),
    )
    predicted = Design(n_seeds, n_arms - 1, n_arms - 1, 2.0).power(difference, alpha)
    assert predicted == pytest.approx(0.9 * found[0] + 0.1 * found[1], abs=4 * 0.5 / math.sqrt(n))


def test_smallest_detectable_difference_has_the_stated_power():
    for design in (separate(4), Design(3, 5, 5, 2.0), Design(3, 5, 5, 2e-4, text=1e-5, text_df=12)):
        assert design.power(smallest_detectable(design, 0.04), 0.04) == pytest.approx(POWER, abs=1e-4)
    assert math.isinf(smallest_detectable(separate(1)))
    assert smallest_detectable(Design(3, 2, 2, 0.0)) == 0.0
    # scales with the noise
    assert smallest_detectable(Design(3, 5, 5, 4.0)) == pytest.approx(2 * smallest_detectable(Design(3, 5, 5, 1.0)))


def test_more_arms_and_more_seeds_detect_smaller_differences():
    by_seeds = [smallest_detectable(Design(n, 3, 3, 1.0)) for n in (2, 3, 5, 10)]
    assert by_seeds == sorted(by_seeds, reverse=True)
    assert smallest_detectable(Design(3, 3, 3, 1.0)) < smallest_detectable(Design(3, 3, 1, 1.0))  # pooled


@pytest.mark.parametrize("n_comparisons", [1, 5])
@pytest.mark.parametrize("difference", [0.5, 1.0, 1.2, 4.0])
def test_more_seeds_by_the_noncentral_t(difference, n_comparisons):
    """Without variance over text and without pooling: the smallest number of seeds with a power of 0.8, or the next."""
    more, remark = more_seeds(separate(3, n_comparisons), difference, 0.05)
    n = 4
    while stats.nct.sf(stats.t.ppf(1 - 0.025 / n_comparisons, n - 1), n - 1, difference * math.sqrt(n)) < 0.8:
        n += 1
    assert abs(more - (n - 3)) <= (n > 20) and remark == ""


def test_differences_that_no_number_of_seeds_settles():
    # With infinitely many seeds the threshold is (2.093 + 0.842) times the deviation over text: t with 19 degrees, 80 %
    by_text = separate(text=1.0, text_df=19.0)
    assert more_seeds(by_text, 2.92, 0.05) == (None, MORE_TEXT)
    assert more_seeds(by_text, 2.95, 0.05) != (None, MORE_TEXT)
    # 100 seeds: 0.8 = P(|t| > 1.984) at a noncentrality of 2.829, from scipy's noncentral t: 0.2829 deviations suffice
    assert more_seeds(separate(), 0.281, 0.05) == (None, TOO_MANY)
    assert more_seeds(separate(), 0.285, 0.05)[0] in (MAX_SEEDS - 4, MAX_SEEDS - 3)
    assert more_seeds(separate(MAX_SEEDS), 0.01, 0.05) == (None, TOO_MANY)
    assert more_seeds(separate(), 0.0, 0.05) == (None, TOO_MANY)
