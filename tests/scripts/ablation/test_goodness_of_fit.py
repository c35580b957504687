"""The tests of the form of the law: by hand, on the published points, and by simulation with a known truth."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.stats import binomtest
from scipy.stats import f as fisher
from scipy.stats import t as student

from tests.scripts.ablation.law_sweeps import LAWS, PUBLISHED_INTERACTION, noisy, points_at, points_from, published
from tril.scripts.ablation.goodness_of_fit import (
    ROUNDING,
    FormTest,
    FormTests,
    MeanSquare,
    check_form,
    correlation,
    least_squares_fit,
    pure_error,
)
from tril.scripts.ablation.scaling_law import Law, fit

STEEP = LAWS[3]  # the fastest one to fit
NOISE = 0.003  # of log L: 0.011 nats of 3.5, the three seeds of the default run


def test_published_points_have_the_interaction_that_was_found_in_them():
    """The correlation of -0.84 was computed independently, from the residuals of the published table."""
    found = check_form(published(), fit(published(), restarts=2))
    assert found.correlation == pytest.approx(-0.84, abs=0.005)
    assert found.interaction is not None and found.interaction.df == (6,) and found.interaction.statistic < -5
    assert found.rejected and found.lack_of_fit is None and found.pure_error is None


def test_coefficient_is_that_of_the_published_points():
    squares, coefficient = least_squares_fit(published(), interaction=True)
    assert coefficient == pytest.approx(PUBLISHED_INTERACTION, abs=5e-5)
    assert squares < least_squares_fit(published())[0] / 5


def test_statistics_agree_with_an_independent_fit():
    """Sums of squares of scipy without our Jacobian, starts or bounds, in other units, t and F from scipy.stats."""
    points = noisy(points_from(LAWS[1]), NOISE, seed=3, seeds=2)
    n, d = points.parameters / 1e6, points.tokens / 1e6
    term = (np.log(n) - np.log(n).mean()) * (np.log(d) - np.log(d).mean())

    def errors(theta):
        e, a, b, alpha, beta, *rest = theta
        return np.log(points.loss / (e + a * n**-alpha + b * d**-beta)) - sum(rest) * term

    without, with_term = (
        least_squares(errors, start, x_scale="jac", xtol=1e-15, ftol=1e-15, gtol=1e-15)
        for start in ([2, 0.8, 1.5, 0.3, 0.5], [2, 0.8, 1.5, 0.3, 0.5, 0])
    )
    logs = np.log(points.by_seed)
    rest = logs - logs.mean(1, keepdims=True) - logs.mean(0) + logs.mean()
    error = (rest**2).sum() / 19
    t = math.copysign(math.sqrt(2 * 2 * (without.cost - with_term.cost) / error), with_term.x[5])
    f = 2 * 2 * without.cost / 15 / error
    found = check_form(points, fit(points, restarts=1))
    assert found.interaction is not None and found.lack_of_fit is not None and found.extra_gain_error is not None
    assert (found.interaction.df, found.lack_of_fit.df) == ((19,), (15, 19))
    assert found.interaction.statistic == pytest.approx(t, rel=1e-4)
    assert found.interaction.p == pytest.approx(min(1, 2 * 2 * student.sf(abs(t), 19)), rel=1e-3)
    assert found.lack_of_fit.statistic == pytest.approx(f, rel=1e-6)
    assert found.lack_of_fit.p == pytest.approx(min(1, 2 * fisher.sf(f, 15, 19)), rel=1e-5)
    gain = -with_term.x[5] * math.log(3_010_560 / 98_304) * math.log(400 / 60) * points.loss.mean()
    assert found.extra_gain == pytest.approx(gain, rel=1e-4)
    assert found.extra_gain_error == pytest.approx(abs(gain / t) * student.ppf(0.975, 19), rel=1e-4)


def test_pure_error_is_that_of_a_two_way_table_without_interaction():
    losses = np.exp([[1.0, 1.4], [2.0, 2.2], [3.0, 3.9]])  # differences of 0.4, 0.2 and 0.9, whose mean is 0.5
    points = points_at([1.0, 2.0, 3.0], [10.0], losses)
    squares = ((np.array([0.4, 0.2, 0.9]) - 0.5) ** 2).sum() / 2
    assert pure_error(points) == (MeanSquare(pytest.approx(squares / 2), 2), pytest.approx(0.5))
    shifted = replace(points, by_seed=losses * [1.0, 1.3])  # a seed that is worse everywhere
    moved = 0.5 + math.log(1.3)
    assert pure_error(shifted) == (MeanSquare(pytest.approx(squares / 2), 2), pytest.approx(moved))


def test_pure_error_of_points_with_different_seeds():
    """Seed 2 occurs once, and the third point has one seed: two points and two seeds are left, with one difference."""
    losses = np.exp([[1.0, 1.4, math.nan], [2.0, 2.2, 7.0], [3.0, math.nan, math.nan]])
    found, _ = pure_error(points_at([1.0, 2.0, 3.0], [10.0], losses))
    assert found == MeanSquare(pytest.approx(0.2**2 / 4), 1)
    assert pure_error(points_at([1.0, 2.0, 3.0], [10.0], losses[:, :1])) == (None, 0.0)


def test_losses_of_a_formula_do_not_reject_it():
    twice = replace(points_from(STEEP), by_seed=points_from(STEEP).by_seed[:, [0, 0]])
    found = check_form(twice, STEEP)
    assert found.pure_error == MeanSquare(ROUNDING, 19) and found.residual == MeanSquare(ROUNDING, 15)
    assert not found.rejected and found.lack_of_fit is not None and found.lack_of_fit.p > 0.5


def test_points_count_by_their_seeds():
    points = noisy(points_from(STEEP), NOISE, seed=0, seeds=2)
    doubled = replace(points, by_seed=np.hstack([points.by_seed] * 2))
    assert least_squares_fit(doubled)[0] == pytest.approx(2 * least_squares_fit(points)[0], rel=1e-6)


def test_six_points_leave_no_error_for_the_interaction():
    points = points_from(STEEP, tokens=(1e5, 3e5, 9e5)).take([0, 1, 2, 5, 8, 11])
    found = check_form(noisy(points, NOISE, seed=0), STEEP)
    assert found.interaction is None and found.extra_gain_error is None and not found.rejected
    assert found.noise is found.residual and found.residual.df == 1


@pytest.mark.parametrize("residual, pure, larger", [(2.0, 1.0, 2.0), (1.0, 2.0, 2.0), (1.0, None, 1.0)])
def test_noise_is_the_larger_estimate(residual, pure, larger):
    pure_error = None if pure is None else MeanSquare(pure, 19)
    assert FormTests(0.0, 0.0, None, None, None, MeanSquare(residual, 15), pure_error, 0.0).noise.value == larger


@pytest.mark.parametrize("p, q, rejected", [(0.04, 1, True), (1, 0.04, True), (0.06, 0.06, False)])
def test_either_test_rejects_the_form(p, q, rejected):
    interaction, lack_of_fit = FormTest(1.0, (19,), p), FormTest(1.0, (15, 19), q)
    assert FormTests(0, 0, None, interaction, lack_of_fit, MeanSquare(1, 15), None, 0.0).rejected is rejected


def test_correlation():
    x, y = np.array([1.0, 2.0, 4.0]), np.array([5.0, 1.0, 0.0])
    assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert correlation(x, np.ones(3)) == 0.0


# ---------------------------------------------------------------- simulations


def rejections(law: Law, times: int, **options) -> dict[str, int]:
    """How many of `times` noisy sweeps are rejected by each test, and by either."""
    counts = {"interaction": 0, "lack of fit": 0, "either": 0}
    for seed in range(times):
        found = check_form(noisy(points_from(law), seed=seed, **options), law)
        for name, test in (("interaction", found.interaction), ("lack of fit", found.lack_of_fit)):
            counts[name] += test is not None and test.p < 0.05
        counts["either"] += found.rejected
    return counts


def assert_rate(count: int, times: int, rate: float) -> None:
    """The count agrees with the rate: a right one fails once in a thousand seeds, and the seeds are fixed."""
    assert binomtest(count, times, rate).pvalue > 1e-3, f"{count} of {times}, expected a share of {rate}"


@pytest.mark.slow
def test_a_right_form_is_rejected_in_one_sweep_of_twenty():
    """Each of the two tests in one of forty. With one seed, the interaction alone, in one of twenty."""
    counts = rejections(STEEP, 200, spread=NOISE, seeds=2)
    assert_rate(counts["interaction"], 200, 0.025)
    assert_rate(counts["lack of fit"], 200, 0.025)
    assert_rate(counts["either"], 200, 0.05)
    assert_rate(rejections(STEEP, 120, spread=NOISE, seeds=1)["interaction"], 120, 0.05)


@pytest.mark.parametrize("times", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_an_interaction_of_the_published_size_is_found(times):
    counts = rejections(STEEP, times, spread=NOISE, seeds=2, interaction=PUBLISHED_INTERACTION)
    assert counts["interaction"] == times


def test_lack_of_fit_finds_a_bend_that_is_no_interaction():
    """The losses of one size are 2 % too high, as by an unsuitable learning rate: seven times the noise."""
    points = noisy(points_from(STEEP), NOISE, seed=1, seeds=2)
    bent = replace(points, by_seed=points.by_seed * np.where(points.parameters == 331_776, 1.02, 1.0)[:, None])
    found = check_form(bent, STEEP)
    assert found.lack_of_fit is not None and found.lack_of_fit.p < 1e-3 and found.rejected
    assert found.noise is found.residual
