"""Ablation by document: losses of documents across windows by hand, and error rates on texts with a known truth."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.conftest import tiny_gpt
from tests.model.heads.test_head_ablation import gate_of
from tril.model.heads.ablation import METHODS, Ablation, ablate, all_heads
from tril.model.heads.ablation_rows import head_rows, removal_rows
from tril.model.heads.attention_maps import TokenWindows
from tril.model.intervals import clustered_mean
from tril.model.text_clusters import TextClusters


def test_the_losses_of_a_document_are_summed_over_its_windows(monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 48)  # batches of 4, 4 and 1 windows
    model, ids, targets = tiny_gpt(), torch.randint(30, (9, 12)), torch.randint(31, (9, 12))
    lengths = torch.tensor([3, 20, 1, 12, 7, 5, 2, 30, 9, 9, 10])  # of 11 documents, 108 targets
    documents = torch.arange(11).repeat_interleave(lengths).view(9, 12)
    ablation = ablate(model, TokenWindows(ids, targets), TextClusters.of(documents, targets))
    assert ablation.clusters.targets.tolist() == lengths.tolist()

    def by_document(gate):
        with torch.no_grad():
            logits = model(ids, head_gate=gate)
        nll = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(9, 12)
        return [nll[documents == document].sum().item() for document in range(11)]

    whole = by_document(None)
    assert ablation.whole.tolist() == pytest.approx(whole, abs=1e-4)
    assert ablation.loss == pytest.approx(sum(whole) / 108, abs=1e-6)
    for head in all_heads(model.config):
        without = by_document(gate_of([head]))
        assert ablation.single["zero"][head].tolist() == pytest.approx(without, abs=1e-4)
        expected = clustered_mean(np.subtract(without, whole), lengths.numpy())
        change = ablation.changes("zero")[head]
        for interval, confidence in ((change.interval, 0.95), (change.corrected, 1 - 0.05 / 8)):
            assert interval.mean == pytest.approx((sum(without) - sum(whole)) / 108, abs=1e-6)
            assert interval.half_width == pytest.approx(expected.interval(confidence).half_width, abs=1e-6)
    without = by_document(gate_of(ablation.orders["zero"][:5]))
    assert ablation.removal["zero"][5].tolist() == pytest.approx(without, abs=1e-4)


def simulated(rng, true_rises):
    """An ablation of 8 heads on 40 documents of unequal length: (2, 4) true rises of the loss."""
    sizes = np.round(40 * rng.lognormal(0, 1, 40)) + 1
    shared = rng.normal(0, 0.05, (1, 1, 40)) + rng.normal(0, 0.05, (2, 4, 40))  # of a document, in all and in one head
    rises = true_rises[..., None] + shared + rng.normal(0, 0.3, (2, 4, 40)) / np.sqrt(sizes)
    whole = sizes * rng.normal(4, 0.8, 40)  # the differences between documents are larger than any rise
    sizes, whole, single = (torch.from_numpy(array) for array in (sizes, whole, whole + sizes * rises))
    clusters = TextClusters(torch.empty(0), sizes, len(sizes), True)
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    return Ablation(
        clusters, whole, dict.fromkeys(METHODS, single), dict.fromkeys(METHODS, heads), dict.fromkeys(METHODS, whole)
    )


def test_useless_heads_are_called_useful_in_at_most_5_of_100_texts_and_intervals_cover_the_truth():
    rng, truth = np.random.default_rng(0), np.zeros((2, 4))
    wrong, covered, n = 0, 0, 500
    for _ in range(n):
        changes = simulated(rng, truth).changes("zero").values()
        wrong += any(change.verdict != "not distinguishable" for change in changes)
        covered += sum(change.interval.low <= 0 <= change.interval.high for change in changes)
    assert wrong / n <= 0.05 + 2 * (0.05 * 0.95 / n) ** 0.5
    assert 0.93 <= covered / (8 * n) <= 0.97


def test_useful_heads_are_found():
    rng, truth = np.random.default_rng(1), np.zeros((2, 4))
    truth[0, 3], truth[1, 1] = 0.2, -0.2  # several standard errors
    for _ in range(50):
        verdicts = {head: change.verdict for head, change in simulated(rng, truth).changes("mean").items()}
        assert (verdicts[0, 3], verdicts[1, 1]) == ("rises", "falls")


def test_the_rows_of_the_files():
    rng, truth = np.random.default_rng(2), np.full((2, 4), 0.1)
    ablation = simulated(rng, truth)
    rows = head_rows(ablation)
    assert [row["head"] for row in rows] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0", "L1H1", "L1H2", "L1H3"]
    change = ablation.changes("mean")[1, 2]
    assert rows[6]["mean"] == {
        "change": change.interval.mean,
        "low": change.interval.low,
        "high": change.interval.high,
        "corrected_low": change.corrected.low,
        "corrected_high": change.corrected.high,
        "verdict": change.verdict,
    }
    curve = torch.stack([ablation.whole, ablation.whole + 0.5 * ablation.clusters.targets])
    orders = dict.fromkeys(METHODS, [(1, 3)])
    [first, second] = removal_rows(
        Ablation(ablation.clusters, ablation.whole, ablation.single, orders, dict.fromkeys(METHODS, curve)), "zero"
    )
    assert first == {
        **{"by": "zero", "n_removed": 0, "removed_last": None, "loss": ablation.loss},
        **{"change": 0.0, "low": 0.0, "high": 0.0},
    }
    assert (second["n_removed"], second["removed_last"]) == (1, "L1H3")
    assert second["loss"] == pytest.approx(ablation.loss + 0.5) and second["low"] == pytest.approx(0.5)
