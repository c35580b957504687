"""Loss spikes: the threshold at literal series, and false alarms on noise."""

import random

import numpy as np
import pytest

from tril.model.training.spikes import THRESHOLD, WINDOW, SpikeDetector


def detected(losses, detector=None, start=1):
    detector = detector or SpikeDetector()
    for step, loss in enumerate(losses, start):
        detector.add(step, loss)
    return detector


def shuffled(values, seed=0):
    return random.Random(seed).sample(values, len(values))


# Of 0, 1, ..., 99 the quartiles are 25, 50 and 75 (the elements at a quarter, a half and three quarters of the order),
# so the threshold is 50 + 6 * 50 / 1.349 = 272.39.
LINE = 50 + 6 * 50 / 1.349


@pytest.mark.parametrize(("loss", "found"), [(LINE - 0.01, []), (LINE + 0.01, [101])])
def test_the_threshold_follows_from_the_quartiles_of_the_last_100_steps(loss, found):
    detector = detected([*shuffled([float(i) for i in range(WINDOW)]), loss])
    assert [spike["step"] for spike in detector.spikes] == found
    if found:
        assert detector.spikes == [{"step": 101, "loss": loss, "z": pytest.approx(6 + 0.01 * 1.349 / 50)}]


def test_only_the_last_100_steps_count():
    """Old losses of another scale leave the window one by one."""
    old, new = [1000.0 + i for i in range(WINDOW)], shuffled([float(i) for i in range(WINDOW)])
    assert [spike["step"] for spike in detected([*old, *new, LINE + 1]).spikes] == [201]


def test_there_is_no_spike_before_the_window_is_full():
    assert detected([*shuffled([float(i) for i in range(WINDOW - 1)]), 1e6]).spikes == []


def test_consecutive_steps_are_one_spike_at_its_highest_loss():
    calm = shuffled([3 + i / 1000 for i in range(WINDOW)])
    detector = detected([*calm, 5.0, 9.0, 7.0, 3.05, 6.0, 3.05])
    assert [(spike["step"], spike["loss"]) for spike in detector.spikes] == [(102, 9.0), (105, 6.0)]


def test_a_lower_loss_is_no_spike():
    assert detected([*shuffled([3 + i / 1000 for i in range(WINDOW)]), 0.0]).spikes == []


@pytest.mark.parametrize(("rise", "spikes"), [(0.0059, 0), (0.0061, 1)])
def test_a_constant_loss_has_a_smallest_deviation(rise, spikes):
    """Six times a thousandth of the median."""
    assert len(detected([1.0] * WINDOW + [1.0 + rise]).spikes) == spikes


def test_noise_has_no_false_alarms():
    """Normal noise reaches six interquartile sigmas of 100 losses less than once in 200,000 steps."""
    noise = np.random.default_rng(0).standard_normal(20_000)
    falling = 3 + 5 * np.exp(-np.arange(20_000) / 500) + 0.1 * noise
    assert detected((3 + 0.1 * noise).tolist()).spikes == detected(falling.tolist()).spikes == []
    assert THRESHOLD == 6.0


def test_an_interrupted_series_continues_within_a_spike():
    losses = [*shuffled([3 + i / 1000 for i in range(WINDOW)]), 5.0, 9.0, 7.0, *[3.05] * 120, 4.0]
    whole = detected(losses)
    for cut in (50, WINDOW + 1, WINDOW + 2, WINDOW + 60):
        first, resumed = detected(losses[:cut]), SpikeDetector()
        resumed.load_state_dict(first.state_dict())
        detected(losses[cut:], resumed, start=cut + 1)
        assert resumed.state_dict() == whole.state_dict()
    assert [spike["step"] for spike in whole.spikes] == [102, 224]
