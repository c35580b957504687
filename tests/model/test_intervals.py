"""Means with their intervals, tested against tables, scipy's t test, and the matrices of the cluster correction."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import sqrtm

from tril.model.intervals import BLOCKS, Interval, block_starts, clustered_mean, mean_interval

# Every fifth of the 89 documents of the standard library's validation text by size, 2026-11-22: tokens
SKEWED = np.array([28350, 11672, 7231, 5520, 4670, 3537, 2882, 2480, 1671, 1290, 921, 700, 630, 448, 347, 255, 164, 66])


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


def test_clustered_mean_is_that_of_the_matrices():
    """CR2 and its degrees of freedom (Bell and McCaffrey 2002) from every target, with the regression's matrices."""
    generator = np.random.default_rng(0)
    sizes = np.array([3, 5, 1, 9, 2])
    losses = [generator.normal(size=size) for size in sizes]
    n = sizes.sum()
    residual_maker, x = np.eye(n) - 1 / n, np.ones(n)
    residuals = residual_maker @ np.concatenate(losses)
    variance, columns = 0.0, []
    for first, size in zip(np.cumsum(sizes) - sizes, sizes, strict=True):
        rows = slice(first, first + size)
        weights = np.linalg.inv(sqrtm(residual_maker[rows, rows]).real) @ x[rows] / n
        variance += (weights @ residuals[rows]) ** 2
        columns.append(residual_maker[:, rows] @ weights)
    form = np.array(columns) @ np.array(columns).T
    found = clustered_mean([each.sum() for each in losses], sizes)
    assert found.mean == pytest.approx(np.concatenate(losses).mean())
    assert found.se == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert found.df == pytest.approx(np.trace(form) ** 2 / np.sum(form**2), rel=1e-9)


def test_clusters_of_equal_size_are_independent_observations():
    values = [3.1, 2.9, 3.3, 3.05]
    found = clustered_mean(np.array(values) * 7, np.full(4, 7))
    assert (found.n, found.effective, found.df) == (4, pytest.approx(4), pytest.approx(3))
    expected = mean_interval(values, 0.9)
    assert [found.interval(0.9).low, found.interval(0.9).high] == pytest.approx([expected.low, expected.high])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "nll, targets, mean",
    [([], [], math.nan), ([6.0], [3], 2.0), ([6.0, 0.0], [3, 0], 2.0), ([1.0, math.inf], [1, 1], math.inf)],
)
def test_clusters_that_give_no_standard_error(nll, targets, mean):
    found = clustered_mean(nll, targets)
    assert found.mean == pytest.approx(mean, nan_ok=True) and math.isnan(found.se) and found.df == 0
    assert (found.interval().low, found.interval().high) == (None, None)


@pytest.mark.parametrize("sizes", [np.full(10, 500), SKEWED], ids=["10 equal", "18 skewed"])
@pytest.mark.parametrize("by_cluster", [True, False], ids=["dependent", "independent"])
def test_coverage_of_the_clustered_mean(sizes, by_cluster):
    """Targets of a cluster that are all equal, or all independent.

    The working model of the degrees of freedom is that of independent targets, and the variance of clusters of unequal
    size is then over-estimated by their number alone; so the coverage is at least the stated rate less one percent.
    """
    n, generator = 4000, np.random.default_rng(0)
    sums = generator.normal(size=(n, len(sizes))) * (sizes if by_cluster else np.sqrt(sizes))
    intervals = [clustered_mean(row, sizes).interval(0.95) for row in sums]
    rate = np.mean([interval.low <= 0 <= interval.high for interval in intervals])
    assert 0.94 - 4 * math.sqrt(0.05 * 0.95 / n) < rate < 0.99


def test_blocks_are_contiguous_and_about_equal():
    assert block_starts(np.full(7, 32)).tolist() == list(range(7))
    assert block_starts(np.full(BLOCKS * 3, 32)).tolist() == list(range(0, BLOCKS * 3, 3))
    weights = np.random.default_rng(0).integers(1, 33, size=1000)
    starts = block_starts(weights)
    sums = np.add.reduceat(weights, starts)
    assert starts[0] == 0 and len(starts) == BLOCKS and abs(sums - weights.sum() / BLOCKS).max() <= 32
    assert block_starts(np.array([1.0, 1.0, 1000.0])).tolist() == [0, 2]
