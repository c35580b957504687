"""Averages over seeds: against numbers by hand and scipy's t interval, and their independence of the heads' order."""

import numpy as np
import pytest
import torch
from scipy import stats

from tril.model.heads.ablation import METHODS, Ablation
from tril.model.heads.seed_averages import QUANTITIES, WHOLE, average, comparable_figures
from tril.model.text_clusters import TextClusters

SIZES = torch.tensor([10.0] * 16)
NOISE = torch.tensor([0.01, -0.01] * 8)  # in nats per token: standard error 0.0026, corrected half width 0.010


def ablation_of(rises, loss=4.0):
    """An ablation with the rises (L, H), in nats per token, whose removals add them up."""
    rises = torch.tensor(rises, dtype=torch.float64)
    heads = [divmod(i, rises.shape[1]) for i in rises.flatten().argsort().tolist()]
    whole = loss * SIZES.double()
    single = whole + SIZES * (rises[..., None] + NOISE)
    totals = torch.cat([torch.zeros(1), rises.flatten().sort().values.cumsum(0)])
    removal = whole + SIZES * totals[:, None]
    clusters = TextClusters(torch.empty(0), SIZES, len(SIZES), True)
    return Ablation(
        clusters, whole, dict.fromkeys(METHODS, single), dict.fromkeys(METHODS, heads), dict.fromkeys(METHODS, removal)
    )


SEEDS = [
    ablation_of([[0.5, 0.0], [0.1, 0.2]], loss=4.0),
    ablation_of([[0.0, 0.3], [0.3, 0.0]], loss=4.2),
    ablation_of([[0.1, -0.1], [0.4, 0.2]], loss=4.1),
]
EXPECTED = {  # of each seed
    (WHOLE, "loss", 0): [4.0, 4.2, 4.1],
    ("zero", "layer", 0): [0.5, 0.3, 0.0],
    ("zero", "layer", 1): [0.3, 0.3, 0.6],
    ("zero", "sum", 0): [0.8, 0.6, 0.6],
    ("zero", "rank", 1): [0.5, 0.3, 0.4],
    ("zero", "rank", 2): [0.2, 0.3, 0.2],
    ("zero", "rank", 3): [0.1, 0.0, 0.1],
    ("zero", "rank", 4): [0.0, 0.0, -0.1],
    ("zero", "removed", 0): [0.0, 0.0, 0.0],
    ("zero", "removed", 1): [0.0, 0.0, -0.1],
    ("zero", "removed", 2): [0.1, 0.0, 0.0],
    ("zero", "removed", 3): [0.3, 0.3, 0.2],
    ("zero", "removed", 4): [0.8, 0.6, 0.6],
    ("zero", "rising", 0): [3, 2, 3],
    ("zero", "falling", 0): [0, 0, 1],
}


def test_means_and_intervals_over_seeds():
    averages = average(SEEDS)
    expected = EXPECTED | {("mean", *key[1:]): values for key, values in EXPECTED.items() if key[0] == "zero"}
    assert averages.keys() == expected.keys() and {name for _, name, _ in averages} == QUANTITIES.keys()
    one = average(SEEDS[:1])["zero", "rank", 1]
    assert (one.mean, one.low, one.high, one.n) == (pytest.approx(0.5), None, None, 1)
    for key, values in expected.items():
        interval = averages[key]
        assert interval.mean == pytest.approx(np.mean(values), abs=1e-9) and interval.n == 3
        half = stats.t.ppf(0.975, 2) * stats.sem(values)
        assert (interval.low, interval.high) == pytest.approx(
            (np.mean(values) - half, np.mean(values) + half), abs=1e-9
        )


def test_the_order_of_the_heads_of_a_layer_is_without_effect():
    a, b = ablation_of([[0.5, 0.0, 0.1], [0.1, 0.2, 0.7]]), ablation_of([[0.0, 0.1, 0.5], [0.7, 0.1, 0.2]])
    assert comparable_figures(a) == pytest.approx(comparable_figures(b))
    other_layer = comparable_figures(ablation_of([[0.1, 0.2, 0.7], [0.5, 0.0, 0.1]]))
    assert comparable_figures(a)["zero", "layer", 0] != pytest.approx(other_layer["zero", "layer", 0])
