"""Comparisons of a sweep in stages: their levels, and what a report says while a stage is not finished."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from tests.scripts.ablation.synthetic import write_sweep
from tril.scripts.ablation.comparisons import compare_with_baseline
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.statistics import EQUAL

BASELINE = {seed: 3.0 + 0.1 * seed for seed in range(7)}
NOISE = (0.000, 0.012, -0.012, 0.003, -0.008, 0.006, -0.001)


def sweep_of(folder, difference: float, *, stages: list[list[int]] | None, states: dict[int, str] | None = None):
    """A variant and the baseline with some seeds; `states` replace the variant's loss with a seed."""
    seeds = range(3) if stages is None else [seed for stage in stages for seed in stage]
    variant = {seed: BASELINE[seed] + difference + NOISE[seed] for seed in seeds}
    losses = {(4,): {seed: BASELINE[seed] for seed in seeds}, (8,): variant | (states or {})}
    path = write_sweep(folder, ["model.n_heads"], losses, baseline=(4,)) / "sweep.json"
    index = json.loads(path.read_text())
    if stages is not None:
        index["stages"] = [{"seeds": stage, "date": "2026-11-22"} for stage in stages]
    path.write_text(json.dumps(index))
    return read_sweep(folder)


def compared(folder, difference: float, margin=None, **options):
    return compare_with_baseline(sweep_of(folder, difference, **options), margin=margin)["n_heads=8"]


@pytest.mark.parametrize(
    "stages, alpha", [(None, 0.04), ([[0, 1, 2]], 0.04), ([[0, 1, 2], [3, 4]], 0.005), ([[0, 1], [2], [3, 4]], 0.0025)]
)
def test_each_stage_has_its_level_and_all_seeds(tmp_path, stages, alpha):
    found = compared(tmp_path, 0.03, stages=stages)
    n = 3 if stages is None else sum(map(len, stages))
    expected = stats.ttest_1samp(0.03 + np.array(NOISE[:n]), 0)
    low, high = expected.confidence_interval(1 - alpha)
    assert (found.stage, found.alpha, found.difference.n) == (len(stages or [0]), alpha, n)
    assert [found.difference.low, found.difference.high] == pytest.approx([low, high], rel=1e-6)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6)


def test_a_proposal_is_tested_at_the_level_of_the_next_stage(tmp_path):
    found = compared(tmp_path, 0.03, stages=[[0, 1, 2]])
    deviation, n = np.std(NOISE[:3], ddof=1), 4
    while stats.nct.sf(stats.t.isf(0.0025, n - 1), n - 1, 0.03 / deviation * math.sqrt(n)) < 0.8:
        n += 1
    assert (found.verdict, found.more_seeds) == ("not distinguishable", n - 3)


def test_a_verdict_of_an_earlier_stage_is_mentioned_if_the_current_one_has_another(tmp_path):
    """0.05 is found with three seeds at 4 %, not with two, and not with a fourth seed that shows the opposite."""
    later = compared(tmp_path / "a", 0.05, stages=[[0, 1, 2], [3]], states={3: BASELINE[3] - 0.03})
    assert later.verdict == "not distinguishable"
    half = stats.t.isf(0.02, 2) * np.std(NOISE[:3], ddof=1) / math.sqrt(3)
    assert f"Stage 1 (seed 0, 1, 2; level 0.04): worse, +0.0500 ± {half:.4f}." in later.remark
    same = compared(tmp_path / "b", 0.05, stages=[[0, 1, 2], [3, 4, 5, 6]])
    assert (same.verdict, same.remark) == ("worse", "")
    found_now = compared(tmp_path / "c", 0.05, stages=[[0, 1], [2, 3, 4, 5, 6]])
    assert (found_now.verdict, found_now.remark) == ("worse", "")


@pytest.mark.parametrize("state", ["unfinished", "not started"])
def test_a_stage_with_unfinished_runs_is_preliminary(tmp_path, state):
    first = compared(tmp_path / "first", 0.05, stages=[[0, 1, 2]], states={2: state})
    assert (first.verdict, first.p, first.difference.low, first.more_seeds) == ("preliminary", None, None, None)
    assert first.difference.mean == pytest.approx(0.05 + np.mean(NOISE[:2]))
    left_out = "Left out, because not finished in both: seed 2."
    assert first.remark == f"Preliminary: 1 of 6 runs of the sweep have not finished. {left_out}"
    second = compared(tmp_path / "second", 0.05, stages=[[0, 1, 2], [3, 4]], states={4: state})
    assert second.verdict == "preliminary" and second.p is None
    assert "Stage 1 (seed 0, 1, 2; level 0.04): worse, +0.0500 ±" in second.remark


def test_a_failed_run_does_not_hold_up_its_stage(tmp_path):
    found = compared(tmp_path, 0.08, stages=[[0, 1, 2]], states={2: "failed"})
    assert (found.verdict, found.difference.n) == ("not distinguishable", 2)


def test_runs_without_a_sweep_file_have_no_plan_that_they_could_miss(tmp_path):
    losses = {(4,): {0: 3.0, 1: 3.1, 2: "unfinished"}, (8,): {0: 3.2, 1: 3.3}}
    found = compare_with_baseline(read_sweep(write_sweep(tmp_path, ["model.n_heads"], losses, index=False)))
    assert found["n_heads=8"].verdict == "worse"


def test_margin(tmp_path):
    close = compared(tmp_path / "close", 0.0, stages=[[0, 1, 2]], margin=0.1)
    assert (close.verdict, close.margin) == (EQUAL, 0.1) and close.p_equal < 0.04
    assert compared(tmp_path / "far", 0.0, stages=[[0, 1, 2]], margin=0.01).verdict == "not distinguishable"
    later = compared(tmp_path / "later", 0.0, stages=[[0, 1], [2]], margin=0.08)
    low, high = -0.08, 0.08
    one_sided = [
        stats.ttest_1samp(NOISE[:3], end, alternative=way).pvalue for end, way in ((high, "less"), (low, "greater"))
    ]
    assert later.p_equal == pytest.approx(max(one_sided)) and (later.verdict == EQUAL) == (max(one_sided) < 0.005)
