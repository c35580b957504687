"""Documents as observations: against counts by hand, scipy's t test on documents, and texts with a known mean."""

import numpy as np
import pytest
import torch

from tril.model.gpt import IGNORE
from tril.model.text_clusters import TextClusters

T = 4


def clusters_of(documents, targets=None):
    documents = torch.as_tensor(documents)
    return TextClusters.of(documents, torch.zeros_like(documents) if targets is None else targets)


def test_a_document_in_several_windows_is_one_cluster():
    documents = torch.tensor([[7, 7, 7, 8], [8, 9, 10, 11], [12, 12, 13, 14], [15, 16, 17, 17], [17, 17, 17, 30]])
    targets = torch.ones(5, T, dtype=torch.long)
    targets[4, 2:] = IGNORE  # the only target of document 30 is one of them
    clusters = clusters_of(documents, targets)
    assert clusters.by_document and clusters.n_documents == 11 and clusters.unit == "documents"
    assert clusters.targets.tolist() == [3, 2, 1, 1, 1, 2, 1, 1, 1, 1, 4, 0]
    nll = torch.arange(20.0).view(5, T) * (targets != IGNORE)
    assert clusters.sums(nll).tolist() == [0 + 1 + 2, 3 + 4, 5, 6, 7, 8 + 9, 10, 11, 12, 13, 14 + 15 + 16 + 17, 0]
    parts = [clusters.sums(nll[:2]), clusters.sums(nll[2:4], first=2), clusters.sums(nll[4:], first=4)]
    assert torch.equal(sum(parts), clusters.sums(nll))
    assert clusters.mean(clusters.sums(nll)).mean == pytest.approx(sum(range(18)) / 18)
    counts = clusters.counts()
    assert (counts["documents"], counts["clusters"]) == (11, 11)
    assert counts["effective_clusters"] == pytest.approx(18**2 / (9 + 4 + 4 + 16 + 7))


@pytest.mark.parametrize(("n_windows", "sizes"), [(40, [2] * 20), (45, [2, 2, 2, 3] * 5), (6, [1] * 6), (2, [1, 1])])
def test_with_few_documents_the_clusters_are_blocks_of_windows(n_windows, sizes):
    documents = torch.arange(n_windows * T).view(n_windows, T) * 9 // (n_windows * T)  # 0 to 8
    clusters = clusters_of(documents)
    assert not clusters.by_document and clusters.n_documents == len(documents.unique()) < 10
    assert sorted((clusters.targets / T).tolist()) == sorted(sizes)
    windows = torch.arange(n_windows)[:, None].expand(n_windows, T).double()
    lengths = (clusters.targets / T).numpy()
    expected = lengths.cumsum() - (lengths + 1) / 2  # the mean number of the windows of consecutive blocks
    assert (clusters.sums(windows) / clusters.targets).tolist() == expected.tolist()


def test_the_description():
    lines = [clusters_of(torch.arange(n)[:, None].expand(n, T)).describe() for n in (12, 3)]
    assert lines[0] == "12 documents, worth 12.0 of equal size, 11.0 degrees of freedom"
    assert lines[1] == (
        "3 blocks of windows (only 3 of 10 documents needed), worth 3.0 of equal size, 2.0 degrees of freedom"
    )


def simulated_text(rng, n_documents, n_windows):
    """Documents (N, T) of evenly spaced windows, lengths log-normal as those of files."""
    lengths = rng.lognormal(5, 1, n_documents).astype(int) + 1
    stream = np.repeat(np.arange(n_documents), lengths)
    whole = len(stream) // 32
    numbers = np.arange(n_windows) * (whole - 1) // (n_windows - 1)
    return torch.from_numpy(stream[numbers[:, None] * 32 + np.arange(32)])


def test_intervals_cover_the_truth_as_often_as_stated():
    """Targets of a document share a random effect: the mean is 0.3, documents have sd 0.5, targets sd 1."""
    rng, by_document, by_window, n = np.random.default_rng(0), 0, 0, 1000
    for repetition in range(n):
        if repetition % 50 == 0:
            documents = simulated_text(rng, 60, 96)
            clusters, targets = clusters_of(documents), torch.zeros_like(documents)
            windows = TextClusters(torch.arange(96)[:, None].expand(96, 32), torch.full((96,), 32.0), 60, True)
        effects = torch.from_numpy(rng.normal(0.3, 0.5, 60))
        nll = effects[documents] + torch.from_numpy(rng.normal(0, 1, targets.shape))
        found = [each.mean(each.sums(nll)).interval() for each in (clusters, windows)]
        covered = [interval.low <= 0.3 <= interval.high for interval in found]
        by_document, by_window = by_document + covered[0], by_window + covered[1]
    assert 0.93 <= by_document / n <= 0.97
    assert by_window / n < 0.85  # windows are not independent
