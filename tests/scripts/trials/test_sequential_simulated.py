"""Simulated comparisons with a known truth: error rates whenever they stop, and the pairs they take."""

import numpy as np
import pytest

from tests.scripts.trials.simulation import NOISES, World, fixed_design, missed_with_text, misses, paths, verdicts
from tril.scripts.trials.sequential import COMBINATION, MAX_PAIRS

PATHS = 20_000
SLACK = 3 * np.sqrt(0.05 * 0.95 / PATHS)  # three standard errors of a simulated rate


def test_any_interval_misses_in_five_percent():
    mean, half = paths(np.random.default_rng(1), PATHS)
    rate = (np.abs(mean) > half).any(1).mean()
    assert 0.05 - SLACK < rate < 0.05 + SLACK
    assert (np.abs(mean[:, -1]) > half[:, -1]).mean() < 0.02  # a single look is far below


@pytest.mark.parametrize("df", [4, 20])
def test_seeds_and_text_together_miss_in_at_most_five_percent(df):
    rng = np.random.default_rng(2)
    mean, half = paths(rng, PATHS)
    sizes = (0.1, 0.3, 1.0, 3.0)
    assert max(missed_with_text(rng, mean, half, text, df, COMBINATION) for text in sizes) < 0.05 + SLACK
    # why they are not combined as independent errors
    assert max(missed_with_text(rng, mean, half, text, df, 2.0) for text in sizes) > 0.06


@pytest.mark.parametrize("noise", ["normal", "heavy tails", "outliers"])
def test_identical_arms_are_called_different_in_at_most_five_percent(noise):
    """200 comparisons of identical arms, whose differences are symmetric, up to 100 pairs and with no margin."""
    counts, pairs, _ = verdicts(World(noise=NOISES[noise]), trials=200, margin=1e-9, max_pairs=MAX_PAIRS)
    assert counts["better"] + counts["worse"] <= 17  # 10 expected; more with a probability of 1 %
    assert counts["equal"] == 0 and pairs > 90


def test_an_improvement_is_found_in_fewer_pairs_than_a_fixed_design():
    """Of two standard deviations; eight pairs in a fixed design find it nearly always as well."""
    world = World(effect=-2.0)
    counts, pairs, _ = verdicts(world, trials=200, margin=0.1, max_pairs=MAX_PAIRS)
    assert counts["better"] == 200 and 4.5 < pairs < 6.5
    rng = np.random.default_rng(3)
    assert np.mean([fixed_design(World(effect=-1.0), rng) for _ in range(400)]) < 0.8
    counts, pairs, _ = verdicts(World(effect=-1.0), trials=200, margin=0.1, max_pairs=MAX_PAIRS)
    assert counts["better"] >= 195 and 10 < pairs < 15


@pytest.mark.slow
@pytest.mark.parametrize("text", [0.3, 3.0])
@pytest.mark.parametrize("noise", ["normal", "heavy tails"])
def test_intervals_cover_the_mean_over_texts_and_seeds(noise, text):
    """Documents of unequal length, with heavy tails, and differences from pair to pair within documents."""
    rng, trials = np.random.default_rng(4), 400
    world = World(effect=0.7, noise=NOISES[noise], text=text)
    missed = sum(misses(world, rng, max_pairs=20) for _ in range(trials))
    assert missed <= 32  # 20 expected at most; more than 32 with a probability of 0.3 %
