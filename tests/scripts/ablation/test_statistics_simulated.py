"""Rates of verdicts and intervals on simulated sweeps whose true differences are known.

The seeds are fixed, so the results are deterministic. The bounds are four standard deviations of the binomial
distribution, which a correct method passes with nearly every seed: 4 * sqrt(0.05 * 0.95 / n) for a rate of 5 % of n.
The fast tests simulate fewer sweeps than those marked long, with the wider bounds that follow from that.
"""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.scripts.ablation.simulated_sweeps import SEED_SD, Outcomes, Truth, follow_proposals, now, plain, simulate
from tests.scripts.ablation.simulation_tables import text
from tril.model.intervals import mean_interval
from tril.scripts.ablation.detection import POWER
from tril.scripts.ablation.power import detectable_difference
from tril.scripts.ablation.stages import FAMILY_ALPHA, FIRST_ALPHA

LONG = pytest.mark.long


def four_deviations(rate: float, n: int) -> float:
    return 4 * math.sqrt(rate * (1 - rate) / n)


@functools.cache
def sweeps(n_arms: int, n_seeds: int, n: int, difference: float = 0.0) -> Outcomes:
    return simulate(plain(n_arms, difference * SEED_SD), n_seeds, n)


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_over_seeds_cover_the_truth_at_the_stated_rate(n_seeds, confidence):
    n, generator = 3000, np.random.default_rng(0)
    found = (mean_interval(values, confidence) for values in generator.normal(3.0, 0.1, size=(n, n_seeds)))
    rate = np.mean([interval.low <= 3.0 <= interval.high for interval in found])
    assert abs(rate - confidence) < four_deviations(confidence, n)


CASES = [
    pytest.param(6, 3, 300, id="6-3"),
    *(pytest.param(a, s, 1000, marks=LONG) for a, s in [(2, 3), (4, 2), (6, 5)]),
]


@pytest.mark.parametrize("n_arms, n_seeds, n", CASES)
@pytest.mark.parametrize("alpha", [0.05, FIRST_ALPHA])
def test_equal_arms_are_called_different_at_most_at_the_stated_rate(n_arms, n_seeds, n, alpha):
    """And not much less often: a much stricter test would miss real differences."""
    rate = sweeps(n_arms, n_seeds, n).family_error(alpha)
    assert alpha / 3 - four_deviations(alpha / 3, n) < rate < alpha + four_deviations(alpha, n)


def test_three_seeds_find_three_deviations_in_more_than_half_of_the_sweeps():
    """Separate variances with Bonferroni's correction find 18 %: docs/ablations.md."""
    n = 300
    rate = sweeps(6, 3, n, difference=3.0).found(0.05)
    assert rate > 0.57 - four_deviations(0.57, n)


UNEQUAL = [
    ({"wide": 0, "ratio": 2.0}, 3, 0.09),
    ({"wide": 0, "ratio": 3.0}, 3, 0.115),
    ({"wide": 1, "ratio": 3.0}, 3, 0.085),
]
UNEQUAL += [({"wide": 0, "ratio": 3.0}, 5, 0.075), ({"t_df": 3}, 3, 0.05)]


@pytest.mark.slow
@pytest.mark.parametrize("options, n_seeds, most", UNEQUAL)
def test_error_with_unequal_variances_and_heavy_tails(options, n_seeds, most):
    """Pooling costs this much if one arm varies more; docs/ablations.md states it. At 5 %, six arms."""
    n = 600
    rate = simulate(plain(6, **options), n_seeds, n).family_error(0.05)
    assert rate < most + four_deviations(most, n)


TEXTS = [pytest.param(n_windows, 0.03, 3, 400, id=f"{n_windows}") for n_windows in (96, None)]
TEXTS += [pytest.param(w, sd, s, 1000, marks=LONG) for w in (96, None) for sd in (0.0, 0.1) for s in (3, 8)]


@pytest.mark.parametrize("n_windows, document_sd, n_seeds, n", TEXTS)
def test_coverage_if_arms_differ_from_document_to_document(n_windows, document_sd, n_seeds, n):
    """96 windows are 13 documents, worth 5 of equal size; the variance of so few is known to few degrees of freedom."""
    rate = simulate(text(n_windows, document_sd), n_seeds, n).coverage
    least = 0.92 if n_windows == 96 else 0.94
    assert rate > least - four_deviations(0.05, n)


def test_difference_well_above_the_noise_is_found_with_its_sign():
    for sign in (1, -1):
        found = sweeps(6, 3, 50, difference=sign * 20.0)
        assert found.found(FIRST_ALPHA) > 0.98 and (found.sign[:, 0] == sign).all()


@pytest.mark.parametrize(
    "n_arms, n_seeds, n", [(6, 3, 300), *(pytest.param(a, s, 1000, marks=LONG) for a, s in [(3, 3), (6, 2)])]
)
def test_smallest_detectable_difference_is_found_with_the_stated_power(n_arms, n_seeds, n):
    rate = sweeps(n_arms, n_seeds, n, difference=detectable_difference(n_arms, n_seeds, None)).found(FIRST_ALPHA)
    assert abs(rate - POWER) < four_deviations(POWER, n) + 0.02


@pytest.mark.long
def test_following_the_proposals_keeps_the_rate():
    """Stages with levels of their own; with one level for all, the rate is 12 to 15 %: docs/ablations.md."""
    n = 250
    wrong, _, seeds = follow_proposals(plain(3), None, n)
    assert wrong < FAMILY_ALPHA + four_deviations(FAMILY_ALPHA, n) and seeds > 6


@pytest.mark.long
@pytest.mark.parametrize("n_arms, n_seeds", [(2, 5), (6, 3)])
def test_differences_of_the_margin_are_called_equal_at_most_at_the_stated_rate(n_arms, n_seeds):
    n, margin = 400, 4 * SEED_SD
    at_margin = replace(plain(n_arms), effects=np.r_[0.0, np.full(n_arms - 1, margin)])
    method = functools.partial(now, alpha=FIRST_ALPHA, margin=margin)
    rate = simulate(at_margin, n_seeds, n, method).equal.any(1).mean()
    assert rate < FIRST_ALPHA + four_deviations(FIRST_ALPHA, n)
    assert simulate(plain(n_arms), n_seeds, n, method).equal.mean() > 0.5


def test_the_simulated_text_is_what_it_says():
    """The variance of what two documents differ by is that of arms, runs and tokens in them."""
    last = 80  # a document to which those before it are compared, so that what a run adds to all of them cancels
    truth: Truth = text(None, 0.2)
    losses = np.stack([truth.losses(np.random.default_rng(seed), 1)[:, 0] for seed in range(400)])  # (n, A, P)
    pieces = truth.text
    targets = pieces.sums(pieces.tokens, pieces.document)
    difference = pieces.sums(losses[:, 1] - losses[:, 0], pieces.document) / targets
    within = difference - difference[:, [last]]
    expected = 2 * (2 * (0.2**2 + 0.01**2) + 0.1**2 * (1 / targets + 1 / targets[last]))
    assert np.var(within[:, :last]) == pytest.approx(expected[:last].mean(), rel=0.1)
    assert len(targets) == 89 and pieces.sums(pieces.tokens, pieces.window).max() == 256 and targets.sum() == 284134
