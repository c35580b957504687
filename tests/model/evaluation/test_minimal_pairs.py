"""Minimal pairs: losses against a loop over tokens, and literal counts."""

import pytest
import torch

from tests.conftest import tiny_gpt
from tril.model.evaluation.minimal_pairs import compare_pairs, text_nll, wilson

EOT = 0


def test_the_loss_of_a_text_against_a_loop_over_its_tokens():
    model, texts = tiny_gpt(), [[5], [4, 9, 2], list(range(1, 13)), [9, 9]]
    found = text_nll(model, texts, EOT)
    for text, nll in zip(texts, found.tolist(), strict=True):
        total = 0.0
        for i, token in enumerate(text):
            with torch.no_grad():
                total -= model(torch.tensor([[EOT, *text[:i]]]))[0, -1].double().log_softmax(-1)[token].item()
        assert nll == pytest.approx(total, abs=1e-4)


def test_a_tie_counts_as_wrong():
    found = compare_pairs(torch.tensor([1.0, 2.0, 3.0, 1.0]), torch.tensor([2.0, 2.0, 1.0, 4.0]))
    assert (found["pairs"], found["right"], found["ties"], found["accuracy"].mean) == (4, 2, 1, 0.5)


def test_wilsons_interval():
    """Against the formula: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    n, p, z = 40, 30 / 40, 1.959963984540054
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    found = wilson(30, 40)
    expected = [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)]
    assert [found.mean, found.low, found.high] == pytest.approx([0.75, *expected])
