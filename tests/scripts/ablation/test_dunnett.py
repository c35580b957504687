"""Dunnett's distribution against published tables, scipy's test and scipy's multivariate t."""

import math

import numpy as np
import pytest
from scipy import stats

from tril.scripts.ablation.dunnett import critical_value, tail_probability

# Dunnett (1964), "New tables for multiple comparisons with a control": two-sided, 5 % and 1 %
TABLE = [(0.05, 5, 2, 3.03), (0.05, 10, 5, 2.99), (0.05, 20, 9, 2.95), (0.05, math.inf, 5, 2.51), (0.01, 10, 5, 3.99)]


@pytest.mark.parametrize("alpha, df, n_comparisons, expected", TABLE)
def test_critical_values_of_the_published_table(alpha, df, n_comparisons, expected):
    assert critical_value(alpha, n_comparisons, df) == pytest.approx(expected, abs=0.006)


def test_p_value_is_that_of_scipys_dunnett():
    groups = np.random.default_rng(0).normal(size=(4, 5))
    groups[1] += 1.5
    found = stats.dunnett(*groups[1:], control=groups[0], rng=np.random.default_rng(0))
    expected = [tail_probability(abs(each), 3, 16) for each in found.statistic]
    assert found.pvalue == pytest.approx(expected, abs=2e-4) and min(expected) < 0.3


@pytest.mark.parametrize("df, correlation", [(2, 0.5), (10, 0.5), (10, 0.2), (40, 0.0)])
def test_probability_is_that_of_the_multivariate_t(df, correlation):
    shape = np.full((4, 4), correlation) + (1 - correlation) * np.eye(4)
    for c in (1.0, 2.5):
        within = stats.multivariate_t(shape=shape, df=df).cdf(np.full(4, c), lower_limit=np.full(4, -c), random_state=0)
        assert tail_probability(c, 4, df, correlation) == pytest.approx(1 - within, abs=2e-4)


@pytest.mark.parametrize("df", [1, 2, 7.5, 1000])
def test_one_comparison_is_students_t(df):
    for t in (0.0, 0.5, 3.0, 50.0):
        assert tail_probability(t, 1, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-6)
    assert critical_value(0.03, 1, df) == pytest.approx(stats.t.isf(0.015, df))


def test_small_probabilities_keep_their_digits():
    """Far out the comparisons exclude each other, and the probability approaches the sum of theirs."""
    sum_of_all = 5 * 2 * stats.t.sf(40, 200)
    assert sum_of_all < 1e-90
    assert tail_probability(40, 5, 200) == pytest.approx(sum_of_all, rel=1e-2)
