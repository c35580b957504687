"""Differences of pairs of runs, their unit, and the half width that the choice of the text adds."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tril.scripts.trials.paired_losses import pair_losses, text_half_width

TARGETS = np.array([30, 10, 20, 0, 40, 10, 10, 50, 10, 10, 60])  # of 11 documents, one of which has none
WINDOWS = np.full(25, 10)


def run(loss, *, seed=0, fingerprint="a", windows=WINDOWS, documents=TARGETS, bytes_per_token=2.0, kept=True):
    """A finished run whose loss is the same everywhere, plus 1 in the first document and window."""
    nll, document_nll = loss * windows, None if documents is None else loss * documents.astype(float)
    if documents is not None:
        document_nll[0] += 1
    nll = nll + np.eye(1, len(windows))[0]
    last = {"nll": nll, "targets": windows, "context_length": windows[0]}
    last |= {} if documents is None else {"document_nll": document_nll, "document_targets": documents}
    summary = {"final_val_loss": loss + 1 / 250, "data_fingerprint": fingerprint, "final_val_bpb": loss / 2}
    summary |= {"val_bytes_per_token": bytes_per_token}
    folder = f"{loss}-{fingerprint}-{seed}"
    return SimpleNamespace(folder=folder, seed=seed, summary=summary, windows=lambda _: last if kept else None)


def test_documents_are_the_clusters():
    found = pair_losses([run(3.0), run(3.1)], [run(2.5), run(3.2)])
    np.testing.assert_allclose(found.differences, [-0.5, 0.1])
    assert found.unit == "nats per token" and found.remark == ""
    sums, targets = found.clusters
    kept = TARGETS[TARGETS > 0]
    np.testing.assert_array_equal(targets, kept)
    np.testing.assert_allclose(sums, np.outer([-0.5, 0.1], kept))
    np.testing.assert_allclose(found.first(1).clusters[0], sums[:1])
    assert found.first(1).differences == [pytest.approx(-0.5)]


@pytest.mark.parametrize("documents", [None, np.array([50, 200])], ids=["old version", "two documents"])
def test_blocks_of_windows_are_the_clusters_without_enough_documents(documents):
    found = pair_losses([run(3.0, documents=documents)], [run(2.0, documents=documents)])
    sums, targets = found.clusters
    assert targets.tolist().count(10) == 15 and targets.tolist().count(20) == 5  # 25 windows in 20 blocks
    np.testing.assert_allclose(sums, [-1.0 * targets])


def test_other_windows_leave_the_text_out():
    found = pair_losses([run(3.0, documents=None)], [run(2.0, documents=None, windows=np.full(49, 5))])
    assert found.clusters is None and "do not cover the same text" in found.remark
    found = pair_losses([run(3.0)], [run(2.0, kept=False)])
    assert found.clusters is None and "were not kept" in found.remark
    assert found.differences == [pytest.approx(-1.0)]


def test_other_tokenizers_are_compared_in_bits_per_byte_and_other_texts_are_refused():
    twice = np.full(50, 10)  # tokens half as long
    found = pair_losses([run(3.0)], [run(2.0, fingerprint="b", windows=twice, bytes_per_token=1.0)])
    assert found.unit == "bits per byte" and found.clusters is None and "tokenizers differ" in found.remark
    assert found.differences == [pytest.approx(-0.5)]
    with pytest.raises(ValueError, match=r"texts of the arms differ \(500 and 1,000 bytes\); give both the same"):
        pair_losses([run(3.0)], [run(2.0, fingerprint="b", windows=twice)])
    with pytest.raises(ValueError, match="texts of the arms differ"):
        pair_losses([run(3.0)], [run(2.0, fingerprint="b", kept=False)])


def test_text_half_width_is_students_interval_for_documents_of_equal_size():
    values = np.array([1.0, 3.0, 2.0, 6.0, 4.0])
    expected = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))[1] - values.mean()
    for n in (1, 3):
        assert text_half_width((np.tile(values * 7, (n, 1)), np.full(5, 7))) == pytest.approx(expected)
    assert text_half_width((np.ones((2, 1)), np.ones(1))) == math.inf


def test_what_differs_from_pair_to_pair_is_not_counted_for_the_text():
    """Differences of documents that all pairs share have the variance 4, those of single pairs 9."""
    rng, n, n_documents = np.random.default_rng(0), 4, 30
    of_text, of_pairs = [], []
    for _ in range(300):
        shared, single = 2 * rng.standard_normal(n_documents), 3 * rng.standard_normal((n, n_documents))
        of_text.append(text_half_width((shared + single, np.ones(n_documents))))
        of_pairs.append(text_half_width((single, np.ones(n_documents))))
    scale = stats.t.ppf(0.975, n_documents - 1) ** 2 / n_documents
    assert np.mean(np.square(of_text)) == pytest.approx(4 * scale, rel=0.05)
    assert np.median(of_pairs) < 0.3 * np.median(of_text)
