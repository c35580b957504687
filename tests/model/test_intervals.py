"""Means with their intervals: against tables, the matrices of the cluster correction, and texts with a known mean."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import sqrtm

from tril.model.gpt import IGNORE
from tril.model.intervals import BLOCKS, block_starts, clustered_mean, mean_interval
from tril.model.text_clusters import TextClusters

# Every fifth of the 89 documents of the standard library's validation text by size, 2026-11-22: tokens
SKEWED = np.array([28350, 11672, 7231, 5520, 4670, 3537, 2882, 2480, 1671, 1290, 921, 700, 630, 448, 347, 255, 164, 66])


def clusters_of(documents, targets=None):
    documents = torch.as_tensor(documents)
    return TextClusters.of(documents, torch.zeros_like(documents) if targets is None else targets)


def test_an_interval_is_that_of_students_t():
    found = mean_interval([1.0, 2.0])  # half of it is t(0.975, 1) = 12.7062 times the standard error 1 / 2, from tables
    assert (found.mean, found.n) == (1.5, 2) and found.high - found.low == pytest.approx(12.7062, abs=1e-4)
    values = [3.1, 2.9, 3.3, 3.05]
    for confidence in (0.5, 0.95, 0.999):
        low, high = stats.ttest_1samp(values, 0).confidence_interval(confidence)
        found = mean_interval(values, confidence)
        assert [found.low, found.high] == pytest.approx([low, high], rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "nll, targets, mean", [([], [], math.nan), ([6.0, 0.0], [3, 0], 2.0), ([1.0, math.inf], [1, 1], math.inf)]
)
def test_what_gives_no_standard_error(nll, targets, mean):
    found = clustered_mean(nll, targets)
    assert found.mean == pytest.approx(mean, nan_ok=True) and math.isnan(found.se) and found.df == 0
    assert (found.interval().low, found.interval().high) == (None, None)


def test_a_clustered_mean_is_that_of_the_matrices():
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
    assert clustered_mean([7.0, 14.0, 7.0, 9.0], [7] * 4).df == pytest.approx(3)


@pytest.mark.parametrize("by_cluster", [True, False], ids=["dependent", "independent"])
def test_coverage_of_a_clustered_mean(by_cluster):
    """Targets of a cluster that are all equal, or all independent.

    The working model of the degrees of freedom is that of independent targets, and the variance of clusters of unequal
    size is then over-estimated by their number alone; so the coverage is at least the stated rate less one percent.
    """
    n, generator = 4000, np.random.default_rng(0)
    sums = generator.normal(size=(n, len(SKEWED))) * (SKEWED if by_cluster else np.sqrt(SKEWED))
    intervals = [clustered_mean(row, SKEWED).interval(0.95) for row in sums]
    rate = np.mean([interval.low <= 0 <= interval.high for interval in intervals])
    assert 0.94 - 4 * math.sqrt(0.05 * 0.95 / n) < rate < 0.99


def test_blocks_are_contiguous_and_about_equal():
    assert block_starts(np.full(7, 32)).tolist() == list(range(7))
    weights = np.random.default_rng(0).integers(1, 33, size=1000)
    starts = block_starts(weights)
    sums = np.add.reduceat(weights, starts)
    assert starts[0] == 0 and len(starts) == BLOCKS and abs(sums - weights.sum() / BLOCKS).max() <= 32
    assert block_starts(np.array([1.0, 1.0, 1000.0])).tolist() == [0, 2]


def test_a_document_in_several_windows_is_one_cluster():
    documents = torch.tensor([[7, 7, 7, 8], [8, 9, 10, 11], [12, 12, 13, 14], [15, 16, 17, 17], [17, 17, 17, 30]])
    targets = torch.ones(5, 4, dtype=torch.long)
    targets[4, 2:] = IGNORE  # the only target of document 30 is one of them
    clusters = clusters_of(documents, targets)
    assert clusters.by_document and clusters.targets.tolist() == [3, 2, 1, 1, 1, 2, 1, 1, 1, 1, 4, 0]
    nll = torch.arange(20.0).view(5, 4) * (targets != IGNORE)
    assert clusters.sums(nll).tolist() == [0 + 1 + 2, 3 + 4, 5, 6, 7, 8 + 9, 10, 11, 12, 13, 14 + 15 + 16 + 17, 0]
    assert torch.equal(sum(clusters.sums(nll[i : i + 2], first=i) for i in (0, 2, 4)), clusters.sums(nll))
    assert clusters.mean(clusters.sums(nll)).mean == pytest.approx(sum(range(18)) / 18)
    assert (clusters.counts()["documents"], clusters.counts()["clusters"]) == (11, 11)


@pytest.mark.parametrize(("n_windows", "sizes"), [(45, [2, 2, 2, 3] * 5), (6, [1] * 6)])
def test_with_few_documents_the_clusters_are_blocks_of_windows(n_windows, sizes):
    clusters = clusters_of(torch.arange(n_windows * 4).view(n_windows, 4) * 9 // (n_windows * 4))  # documents 0 to 8
    assert not clusters.by_document and sorted((clusters.targets / 4).tolist()) == sorted(sizes)
    lengths = (clusters.targets / 4).numpy()
    means = lengths.cumsum() - (lengths + 1) / 2  # of the numbers of the windows of consecutive blocks
    windows = torch.arange(n_windows)[:, None].expand(n_windows, 4).double()
    assert (clusters.sums(windows) / clusters.targets).tolist() == means.tolist()
    described = f"{len(sizes)} blocks of windows (only 9 of 10 documents needed), "
    assert clusters.describe().startswith(described) or n_windows == 6


def test_intervals_cover_the_truth_as_often_as_stated():
    """Targets of a document share a random effect: the mean is 0.3, documents have sd 0.5, targets sd 1."""
    rng, by_document, by_window, n = np.random.default_rng(0), 0, 0, 1000
    for repetition in range(n):
        if repetition % 50 == 0:  # evenly spaced windows of documents whose lengths are log-normal, as those of files
            stream = np.repeat(np.arange(60), rng.lognormal(5, 1, 60).astype(int) + 1)
            numbers = np.arange(96) * (len(stream) // 32 - 1) // 95
            documents = torch.from_numpy(stream[numbers[:, None] * 32 + np.arange(32)])
            clusters = clusters_of(documents)
            windows = TextClusters(torch.arange(96)[:, None].expand(96, 32), torch.full((96,), 32.0), 60, True)
        nll = torch.from_numpy(rng.normal(0.3, 0.5, 60))[documents] + torch.from_numpy(
            rng.normal(0, 1, documents.shape)
        )
        found = [each.mean(each.sums(nll)).interval() for each in (clusters, windows)]
        covered = [interval.low <= 0.3 <= interval.high for interval in found]
        by_document, by_window = by_document + covered[0], by_window + covered[1]
    assert 0.93 <= by_document / n <= 0.97
    assert by_window / n < 0.85  # windows are not independent
