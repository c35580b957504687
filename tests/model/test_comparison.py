"""Means with their intervals, and comparisons: against the matrices of their definitions and against simulated truths.

Letters: N repetitions, V variants with the baseline, S seeds, G documents.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.oracles import SIZES, cr2, intervals, text_part
from tril.data.batches import IGNORE
from tril.model.comparison import BETTER, DIVERGED, EQUAL, ONE_DOCUMENT, ONE_SEED, POWER, UNCLEAR, WORSE, compare
from tril.model.intervals import BLOCKS, block_starts, clustered_mean, mean_interval
from tril.model.text_clusters import TextClusters

REPETITIONS = 20_000
LEVEL = 0.04  # of the first launch of a sweep


# --- means over clusters


def test_an_interval_is_that_of_students_t():
    values = [3.1, 2.9, 3.3, 3.05]
    for confidence in (0.5, 0.95, 0.999):
        low, high = stats.ttest_1samp(values, 0).confidence_interval(confidence)
        found = mean_interval(values, confidence)
        assert [found.low, found.high] == pytest.approx([low, high], rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("nll", "targets", "mean"), [([], [], math.nan), ([6.0, 0.0], [3, 0], 2.0), ([1.0, math.inf], [1, 1], math.inf)]
)
def test_what_gives_no_standard_error(nll, targets, mean):
    found = clustered_mean(nll, targets)
    assert found.mean == pytest.approx(mean, nan_ok=True) and math.isnan(found.se) and found.df == 0
    assert (found.interval().low, found.interval().high) == (None, None)


def test_a_document_in_several_windows_is_one_cluster():
    documents = torch.tensor([[7, 7, 7, 8], [8, 9, 10, 11], [12, 12, 13, 14], [15, 16, 17, 17], [17, 17, 17, 30]])
    targets = torch.ones(5, 4, dtype=torch.long)
    targets[4, 2:] = IGNORE  # the only target of document 30 is one of them
    clusters = TextClusters.of(documents, targets)
    assert clusters.by_document and clusters.targets.tolist() == [3, 2, 1, 1, 1, 2, 1, 1, 1, 1, 4, 0]
    nll = torch.arange(20.0).view(5, 4) * (targets != IGNORE)
    assert clusters.sums(nll).tolist() == [0 + 1 + 2, 3 + 4, 5, 6, 7, 8 + 9, 10, 11, 12, 13, 14 + 15 + 16 + 17, 0]
    assert torch.equal(sum(clusters.sums(nll[i : i + 2], first=i) for i in (0, 2, 4)), clusters.sums(nll))
    assert clusters.mean(clusters.sums(nll)).mean == pytest.approx(sum(range(18)) / 18)
    assert (clusters.counts()["documents"], clusters.counts()["clusters"]) == (11, 11)


@pytest.mark.parametrize(("n_windows", "sizes"), [(45, [2, 2, 2, 3] * 5), (6, [1] * 6)])
def test_with_few_documents_the_clusters_are_blocks_of_consecutive_windows(n_windows, sizes):
    documents = torch.arange(n_windows * 4).view(n_windows, 4) * 9 // (n_windows * 4)  # 0 to 8
    clusters = TextClusters.of(documents, torch.zeros_like(documents))
    assert not clusters.by_document and sorted((clusters.targets / 4).tolist()) == sorted(sizes)
    windows = torch.arange(n_windows)[:, None].expand(n_windows, 4).double()
    lengths = clusters.targets / 4
    assert torch.equal(clusters.sums(windows) / clusters.targets, lengths.cumsum(0) - (lengths + 1) / 2)
    weights = np.random.default_rng(0).integers(1, 33, size=1000)
    starts = block_starts(weights)
    sums = np.add.reduceat(weights, starts)
    assert starts[0] == 0 and len(starts) == BLOCKS and abs(sums - weights.sum() / BLOCKS).max() <= 32


# --- comparisons


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(2, 5),
    st.integers(2, 5),
    st.sampled_from([1, 12]),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.integers(0, 99),
    st.booleans(),
)
def test_intervals_are_those_of_an_independent_computation(n_variants, n_seeds, n_documents, of_text, number, paired):
    chance = np.random.default_rng(number)
    losses, sizes = chance.normal(size=(n_variants, n_seeds, n_documents)), SIZES[:n_documents]
    losses += of_text * chance.normal(size=(n_variants, 1, n_documents))
    (means,), (halves,) = intervals(losses[None], sizes, LEVEL, paired)
    found = compare(losses, sizes, LEVEL, paired=paired)
    assert [each.difference.mean for each in found] == pytest.approx(means)
    assert [each.difference.half_width for each in found] == pytest.approx(halves)
    verdicts = [UNCLEAR if abs(m) <= h else BETTER if m < 0 else WORSE for m, h in zip(means, halves, strict=True)]
    assert [each.verdict for each in found] == verdicts and {each.seeds for each in found} == {n_seeds}


def test_only_pairs_of_seeds_count_and_a_diverged_run_or_one_seed_decides_nothing():
    losses = np.random.default_rng(0).normal(size=(5, 4, 12))
    losses[1, 3] = losses[0, 0] = np.nan  # runs that do not exist
    losses[2, 2] = np.inf  # a run that diverged
    losses[3, 1:] = np.nan
    first, diverged, none, last = compare(losses, SIZES)
    assert (diverged.verdict, diverged.difference.low, diverged.se) == (DIVERGED, None, None)
    assert (none.verdict, none.seeds, none.difference.low) == (ONE_SEED, 0, None)
    pairs = [losses[1, 1:3] - losses[0, 1:3], losses[4, 1:] - losses[0, 1:]]
    by_seed = [each @ SIZES / SIZES.sum() for each in pairs]
    pooled = np.sum([each.var(ddof=1) * (len(each) - 1) for each in by_seed]) / 3
    for found, each, values in zip((first, last), pairs, by_seed, strict=True):
        text, text_df = text_part(each, SIZES)
        of_seeds = stats.t.isf(0.05 / 8, 4 * 3 / 5) ** 2 * max(pooled, values.var(ddof=1)) / len(each)
        assert found.difference.mean == pytest.approx(values.mean()) and found.seeds == len(each)
        half = (of_seeds + stats.t.isf(0.05 / 8, text_df) ** 2 * text) ** 0.5
        assert found.difference.half_width == pytest.approx(half)
    assert compare(losses[:, 1:2], SIZES)[0].verdict == ONE_SEED


def test_trained_models_are_compared_over_documents():
    losses = np.random.default_rng(1).normal(size=(4, 1, 12))
    for found, row in zip(compare(losses, SIZES, of_models=True), losses[1:], strict=True):
        variance, df = cr2(row[0] - losses[0, 0], SIZES)
        assert found.difference.half_width == pytest.approx(stats.t.isf(0.025 / 3, df) * variance**0.5)
        assert (found.seeds, found.df) == (1, pytest.approx(df))
    assert compare(losses[:, :, :1], SIZES[:1], of_models=True)[0].verdict == ONE_DOCUMENT
    losses[1] = np.inf
    assert compare(losses, SIZES, of_models=True)[0].verdict == DIVERGED


@pytest.mark.parametrize(
    ("mean", "margin", "verdict"), [(0.1, 0.2, EQUAL), (0.1, 0.15, WORSE), (-0.1, 0.05, BETTER), (0.01, 0.05, UNCLEAR)]
)
def test_equal_means_that_the_interval_is_within_the_margin(mean, margin, verdict):
    spread = 0.09 / 4.303 * 3**0.5 * np.array([-1, 0, 1])  # half a width of 0.09 with three seeds
    (found,) = compare(np.array([np.zeros((3, 1)), mean + spread[:, None]]), np.ones(1), margin=margin)
    assert found.verdict == verdict and found.difference.half_width == pytest.approx(0.09, rel=1e-3)


def sweeps(n_variants, n_seeds, sds=(), of_text=0.0, of_rest=0.0, of_seed=10.0):
    """Losses (N, V, S, G) of configurations whose true losses are 0; `of_seed`: of what a seed does to all of them."""
    chance, shape = np.random.default_rng(0), (REPETITIONS, n_variants, n_seeds, 1)
    of_runs = chance.normal(size=shape) * np.reshape([*sds, *[1] * (n_variants - len(sds))], (-1, 1, 1))
    losses = of_runs + of_seed * chance.normal(size=(REPETITIONS, 1, n_seeds, 1))
    if not of_text and not of_rest:
        return losses, np.ones(1)
    scale = np.sqrt(SIZES.mean() / SIZES)  # a longer document has a steadier mean
    text = of_text * chance.normal(size=(REPETITIONS, n_variants, 1, len(SIZES))) * scale
    rest = of_rest * chance.normal(size=(REPETITIONS, n_variants, n_seeds, len(SIZES))) * scale
    return losses + text + rest, SIZES


EVEN = [{"n_variants": v, "n_seeds": s} for v, s in ((2, 2), (2, 5), (3, 3), (6, 2), (6, 5))]
EVEN += [{"n_variants": 3, "n_seeds": s, "of_text": t, "of_rest": 1.0} for s, t in ((3, 0.3), (3, 3.0), (8, 1.0))]
SPREADS = (3, 2, [3]), (6, 2, [3]), (6, 3, [1, 1, 1, 1, 1, 3]), (6, 5, [2]), (3, 8, [3]), (2, 3, [1, 10]), (4, 3, [10])
UNEVEN = [{"n_variants": v, "n_seeds": s, "sds": sds} for v, s, sds in SPREADS]


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("case", "most"), [*((case, 0.055) for case in EVEN), *((case, 0.06) for case in UNEVEN)])
def test_equal_configurations_are_seldom_called_different(case, most, paired):
    """And the intervals of a family hold all true differences, here 0, in at least 94 % of sweeps."""
    losses, sizes = sweeps(**case, of_seed=10.0 if paired else 0.0)
    mean, half = intervals(losses, sizes, 0.05, paired)
    assert (np.abs(mean) > half).any(1).mean() <= most


@pytest.mark.slow
@pytest.mark.parametrize(("correlation", "is_better"), [(0.0, False), (0.6, True), (0.9, True)])
def test_pairs_of_seeds_have_more_power_only_where_seeds_correlate(correlation, is_better):
    """The table of docs/ablations.md: a true difference of three standard deviations, three seeds."""
    for n_variants in (2, 4, 6):
        losses, sizes = sweeps(n_variants, 3, of_seed=(correlation / (1 - correlation)) ** 0.5)
        losses *= (1 - correlation) ** 0.5
        powers, errors = [], []
        for paired in (True, False):
            mean, half = intervals(losses, sizes, LEVEL, paired)
            errors.append((np.abs(mean) > half).any(1).mean())
            powers.append((mean[:, -1] + 3 > half[:, -1]).mean())
        found = f"power {np.round(powers, 3)}, errors {np.round(errors, 3)}"
        print(f"{n_variants} variants, correlation {correlation}: {found}")
        assert (powers[0] > powers[1]) == is_better
        assert max(errors) <= LEVEL + 0.005


@pytest.mark.parametrize(
    ("paired", "case"),
    [
        (True, {"n_variants": 2, "n_seeds": 3}),
        (False, {"n_variants": 2, "n_seeds": 3}),
        pytest.param(True, {"n_variants": 6, "n_seeds": 3, "of_text": 1}, marks=pytest.mark.slow),
        pytest.param(True, {"n_variants": 2, "n_seeds": 8, "of_text": 1}, marks=pytest.mark.slow),
        pytest.param(False, {"n_variants": 2, "n_seeds": 8, "of_text": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_smallest_detectable_difference_is_found_with_the_stated_power(case, paired):
    """The difference that single sweeps state is itself uncertain: their median is compared."""
    losses, sizes = sweeps(**case, of_seed=10.0 if paired else 0.0)
    stated = float(np.median([compare(each, sizes, LEVEL, paired=paired)[-1].detectable for each in losses[:400]]))
    losses[:, -1] += stated
    mean, half = intervals(losses, sizes, LEVEL, paired)
    assert abs((mean[:, -1] > half[:, -1]).mean() - POWER) < 0.12


@pytest.mark.parametrize("effect", [0.05, 0.1, 0.4, 3.0])
def test_the_seeds_needed_are_the_first_with_the_power_of_a_t_test(effect):
    differences = np.array([0.1, 0.3, 0.2, 0.6])
    (found,) = compare(np.stack([np.zeros(4), differences])[..., None], np.ones(1))

    def power(n):
        return stats.nct.sf(stats.t.isf(0.01, n - 1), n - 1, effect / differences.std(ddof=1) * n**0.5)

    expected = next((n for n in range(2, 1001) if power(n) >= POWER), None)
    assert found.seeds_needed(effect, 0.02) == expected
    losses, sizes = sweeps(2, 3, of_text=1.0, of_seed=0.0)
    assert compare(losses[0], sizes, LEVEL, paired=False)[0].seeds_needed(0.1, LEVEL) is None  # the text hides it
