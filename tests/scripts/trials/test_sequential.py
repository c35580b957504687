"""The confidence sequence: its Bayes factor against an integral, its bounds, and what a look allows to conclude."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import trapezoid

from tril.scripts.trials.sequential import EFFECT_PRIOR, MAX_PAIRS, Look, half_width, log_bayes_factor, log_threshold


@pytest.mark.parametrize("x", [[0.3, -0.1, 0.8], [2.0, 2.1, 1.7, 2.4], [-1.0, 0.2, 0.1, -0.4, 0.3]])
def test_bayes_factor_is_the_ratio_of_integrated_likelihoods(x):
    """Over an effect with a normal prior, and over sigma with the density 1 / sigma."""
    log_sigma, effect = np.linspace(-5, 6, 221)[:, None], np.linspace(-14, 14, 1401)  # (221, 1), (1401,)
    sigma = np.exp(log_sigma)  # d log sigma = d sigma / sigma

    def likelihood(mean):
        return math.prod(stats.norm.pdf(value, mean, sigma) for value in x)

    null = trapezoid(likelihood(0.0)[:, 0], log_sigma[:, 0])
    with_effect = trapezoid(likelihood(effect * sigma) * stats.norm.pdf(effect, 0, EFFECT_PRIOR), effect)  # (221,)
    t = stats.ttest_1samp(x, 0).statistic
    expected = math.log(trapezoid(with_effect, log_sigma[:, 0]) / null)
    assert log_bayes_factor(len(x), t**2) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("n", [3, 4, 10, MAX_PAIRS])
@pytest.mark.parametrize("sd", [0.5, 20.0])
def test_ends_of_the_interval_are_at_the_threshold(n, sd):
    t = half_width(n, sd) / (sd / math.sqrt(n))
    assert log_bayes_factor(n, t**2) == pytest.approx(log_threshold(), abs=1e-9)


def test_two_pairs_give_no_interval():
    """No t statistic of one degree of freedom is evidence enough."""
    assert half_width(1, math.nan) == half_width(2, 1.0) == math.inf
    assert log_bayes_factor(2, 1e30) < log_threshold()
    assert math.isfinite(half_width(3, 1.0))


def test_threshold_is_below_that_of_an_unlimited_sequence_and_falls_with_alpha():
    assert log_threshold(0.2, 10) < log_threshold(0.05, 10) < log_threshold() < math.log(1 / 0.05)


def look(mean, half):
    """With an interval of this half width."""
    return Look(9, mean, 1.0, half, 0.0)


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (-0.5, 0.4, "better"),
        (0.5, 0.4, "worse"),
        (-0.05, 0.04, "better"),  # by less than the margin
        (0.05, 0.04, "worse"),
        (0.02, 0.07, "equal"),
        (0.02, 0.081, None),
        (-0.02, 0.07, "equal"),
        (-0.02, 0.081, None),
        (0.0, math.inf, None),
        (-0.5, math.inf, None),
        (-0.5, 0.5, None),
    ],
)
def test_verdict(mean, half, verdict):
    assert look(mean, half).verdict(margin=0.1) == verdict


def test_interval_of_seeds_and_text():
    found = Look(9, 2.0, 1.0, seeds=0.3, text=0.4)
    assert found.half == pytest.approx((0.3**1.1 + 0.4**1.1) ** (1 / 1.1))
    assert 0.5 < found.half < 0.7  # between independent errors and their sum
    assert (found.low, found.high) == (2.0 - found.half, 2.0 + found.half)
    assert look(0.0, 0.3).half == pytest.approx(0.3)


def test_look_at_differences():
    found = Look.at(np.array([1.0, 2.0, 4.0, 5.0]), text=0.25)
    assert (found.n, found.mean, found.text) == (4, 3.0, 0.25)
    assert found.sd == pytest.approx(math.sqrt(10 / 3)) and found.seeds == half_width(4, found.sd)


def test_bitwise_equal_losses_are_equal():
    assert Look.at(np.zeros(1)).verdict(0.1) is None
    found = Look.at(np.zeros(2), text=math.inf)
    assert (found.low, found.high, found.verdict(0.1)) == (0.0, 0.0, "equal")


def test_pairs_needed_gives_a_verdict_and_one_pair_less_does_not():
    now = Look(5, -0.6, 1.0, half_width(5, 1.0), text=0.2)
    needed = now.pairs_needed(margin=0.01)
    later = [Look(n, -0.6, 1.0, half_width(n, 1.0), 0.2).verdict(0.01) for n in (needed - 1, needed)]
    assert later == [None, "better"]
    assert Look(5, -0.6, 1.0, half_width(5, 1.0), text=0.7).pairs_needed(margin=0.01) is None
    assert Look(1, -0.6, math.nan, math.inf, 0.0).pairs_needed(margin=0.01) is None


@pytest.mark.parametrize(
    ("mean", "seeds", "text", "settled"),
    [(0.1, 0.1, 0.5, True), (0.1, 0.45, 0.5, False), (0.0, 0.004, 0.005, False), (0.6, 0.01, 0.5, False)],
)
def test_settled_by_text(mean, seeds, text, settled):
    """No mean within the interval over seeds could be told from 0, nor called equal."""
    found = Look(9, mean, 1.0, seeds, text)
    assert found.settled_by_text(margin=0.01) == settled
    possible = [Look(9, m, 1.0, 0.0, text).verdict(0.01) for m in np.linspace(mean - seeds, mean + seeds, 101)]
    assert settled == (not any(possible))
