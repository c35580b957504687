"""Rates of intervals and verdicts on simulated sweeps whose true differences are known.

The seeds are fixed, so the results are deterministic. The bounds are four standard deviations of the binomial
distribution, which a correct method passes with nearly every seed: 4 * sqrt(0.05 * 0.95 / n) for a rate of 5 % of n.
The fast tests simulate fewer sweeps than the slow ones, with the wider bounds that follow from that.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from tril.model.intervals import mean_interval
from tril.scripts.ablation.statistics import BLOCKS, Comparison, compare

DOCUMENT = 5  # windows: neighbors in a document are not independent
SLOW = pytest.mark.slow


def four_deviations(rate: float, n: int) -> float:
    return 4 * math.sqrt(rate * (1 - rate) / n)


def documents(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal values, equal for all windows (the last axis) of a document."""
    return np.repeat(generator.normal(size=(*shape[:-1], shape[-1] // DOCUMENT)), DOCUMENT, axis=-1)


def simulate(
    generator: np.random.Generator,
    n_variants: int,
    n_seeds: int,
    *,
    per_seed: float = 0.01,
    text: float = 0.0,
    noise: float = 0.05,
) -> np.ndarray:
    """Losses (variants, S, 200) of equally good configurations, in nats per token.

    The variation that all of them share is large: windows differ by 0.5 and seeds by 0.1.

    Args:
        per_seed: deviation of the interaction of variant and seed.
        text: deviation of the interaction of variant and document.
        noise: deviation of each run in each document, and in each window.
    """
    n_windows = 200
    shared = 3 + 0.5 * documents(generator, 1, 1, n_windows) + 0.1 * generator.normal(size=(1, n_seeds, 1))
    losses = (
        shared
        + per_seed * generator.normal(size=(n_variants, n_seeds, 1))
        + text * documents(generator, n_variants, 1, n_windows)
    )
    every = (n_variants, n_seeds, n_windows)
    return losses + noise * (documents(generator, *every) + generator.normal(size=every))


def against_the_first(losses: np.ndarray, *, n_comparisons: int) -> Iterator[Comparison]:
    baseline, *others = ({seed: row for seed, row in enumerate(variant)} for variant in losses)
    return (compare(variant, baseline, np.full(losses.shape[2], 32), n_comparisons=n_comparisons) for variant in others)


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_over_seeds_cover_the_truth_at_the_stated_rate(n_seeds, confidence):
    n, generator = 3000, np.random.default_rng(0)
    found = (mean_interval(values, confidence) for values in generator.normal(3.0, 0.1, size=(n, n_seeds)))
    rate = np.mean([interval.low <= 3.0 <= interval.high for interval in found])
    assert abs(rate - confidence) < four_deviations(confidence, n)


def coverage(n: int, n_seeds: int, **parts: float) -> float:
    """Share of the intervals that contain the true difference, 0.2."""
    generator, hits = np.random.default_rng(1), 0
    for _ in range(n):
        losses = simulate(generator, 2, n_seeds, **parts)
        losses[1] += 0.2
        [found] = against_the_first(losses, n_comparisons=1)
        hits += found.difference.low <= 0.2 <= found.difference.high
    return hits / n


COVERAGE_CASES = [pytest.param(3, 200, id="3 seeds"), *(pytest.param(n, 1000, marks=SLOW) for n in (2, 3, 5))]


@pytest.mark.parametrize("n_seeds, n", COVERAGE_CASES)
@pytest.mark.parametrize("per_seed, most", [(0.03, 0.95), (0.01, 0.97)])
def test_differences_cover_the_truth_at_the_stated_rate(n_seeds, n, per_seed, most):
    """And not much above it, since wider intervals would hide real differences.

    If runs differ by little except noise, the differences between blocks of text can be due to the text, and the
    intervals allow for that.
    """
    rate = coverage(n, n_seeds, per_seed=per_seed)
    assert 0.95 - four_deviations(0.95, n) < rate < most + four_deviations(most, n)


@pytest.mark.parametrize("n_seeds, n", COVERAGE_CASES)
def test_differences_cover_the_truth_if_it_depends_on_the_text(n_seeds, n):
    """At not less than the stated rate; the variance from the text is four times that from the seeds.

    With five seeds it is not much above the rate. With fewer it is, because the variance of few seeds is itself
    uncertain.
    """
    text = math.sqrt(4 * 0.01**2 / n_seeds * 200 / DOCUMENT)
    rate = coverage(n, n_seeds, text=text, noise=0.01)
    assert 0.95 - four_deviations(0.95, n) < rate <= (0.97 if n_seeds == 5 else 1.0)


@pytest.mark.parametrize("n", [400, pytest.param(2000, marks=SLOW)])
def test_identical_configurations_are_called_different_in_at_most_5_percent_of_sweeps(n):
    """Six equally good variants, three seeds: any other verdict than "not distinguishable" is false."""
    generator = np.random.default_rng(2)
    sweeps = (against_the_first(simulate(generator, 6, 3, per_seed=0.03), n_comparisons=5) for _ in range(n))
    false = sum(any(found.verdict != "not distinguishable" for found in sweep) for sweep in sweeps)
    assert false / n < 0.05 + four_deviations(0.05, n)
    assert false > 0.02 * n  # Bonferroni's bound is nearly reached; a much stricter test would miss real differences


def test_difference_well_above_the_noise_is_detected():
    """0.25 nats are half the deviation between windows, but twenty standard errors of the pairs."""
    n, generator = 50, np.random.default_rng(3)
    for sign, verdict in ((1, "worse"), (-1, "better")):
        verdicts = []
        for _ in range(n):
            losses = simulate(generator, 6, 3)
            losses[1] += sign * 0.25
            verdicts.append(next(against_the_first(losses, n_comparisons=5)).verdict)
        assert verdicts.count(verdict) >= 0.98 * n


SETTLED_CASES = [(1.2, 0.0, 5), (0.7, 0.0, 1), (1.2, 0.03, 5)]


@pytest.mark.parametrize(
    "mean, text, n_comparisons, n", [(1.2, 0.03, 5, 200), *(pytest.param(*c, 1000, marks=SLOW) for c in SETTLED_CASES)]
)
def test_proposed_number_of_seeds_settles_80_percent_of_new_sweeps(mean, text, n_comparisons, n):
    """Three seeds show this difference, a deviation of 1 between seeds and a variance `text` of the mean from the text.

    In new sweeps this is the truth. With the proposed number of seeds 80 % are settled, with one seed fewer less.
    """
    generator = np.random.default_rng(4)
    blocks = np.tile([1.0, -1.0], BLOCKS // 2) * math.sqrt(text * (BLOCKS - 1))
    seen = mean + np.array([-1.0, 0.0, 1.0])[:, None] + blocks  # (S, K)
    zero = np.zeros_like(seen)
    [now] = against_the_first(np.stack([zero, seen]), n_comparisons=n_comparisons)
    assert now.verdict == "not distinguishable"

    def settled(n_seeds: int) -> float:
        differences = (
            mean
            + generator.normal(size=(n, n_seeds, 1))
            + math.sqrt(text * BLOCKS) * generator.normal(size=(n, 1, BLOCKS))
        )
        sweeps = (against_the_first(np.stack([np.zeros_like(d), d]), n_comparisons=n_comparisons) for d in differences)
        return np.mean([found.verdict == "worse" for [found] in sweeps])

    rate, one_fewer = settled(3 + now.more_seeds), settled(2 + now.more_seeds)
    assert 0.8 - four_deviations(0.8, n) < rate
    assert one_fewer < 0.8 + four_deviations(0.8, n)
