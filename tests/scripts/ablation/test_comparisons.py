"""Variants compared with the baseline: which losses are paired, and the remark if they cannot be."""

import json
import math

import numpy as np
import pytest

from tests.scripts.ablation.synthetic import bpb, write_run, write_sweep
from tril.model.intervals import block_starts
from tril.scripts.ablation.comparisons import compare_with_baseline
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.statistics import Comparison, compare_arms

HEADS = ["model.n_heads"]


def compare(variant: dict, baseline: dict, targets: np.ndarray, *, n_comparisons: int, **options) -> Comparison:
    """Of losses of windows, (N,) for each seed, in blocks; the level is that of the first stage."""
    return compare_family({"variant": variant}, baseline, targets, n_comparisons=n_comparisons, **options)["variant"]


def compare_family(arms: dict, baseline: dict, targets: np.ndarray, *, alpha: float = 0.04, **options) -> dict:
    starts = block_starts(targets)

    def blocks(arm: dict) -> dict:
        return {
            seed: np.add.reduceat(losses * targets, starts) / np.add.reduceat(targets, starts)
            for seed, losses in arm.items()
        }

    named = {name: blocks(arm) for name, arm in arms.items()}
    return compare_arms(named, blocks(baseline), np.add.reduceat(targets, starts), alpha=alpha, **options)


@pytest.fixture
def losses() -> dict[tuple, dict[int, np.ndarray]]:
    """Three variants, three seeds, 40 windows."""
    generator = np.random.default_rng(0)
    return {(heads,): {seed: 3 + 0.1 * generator.normal(size=40) for seed in (0, 1, 2)} for heads in (1, 4, 8)}


def test_finished_runs_are_paired_by_seed_and_block_of_windows(tmp_path, losses):
    sweep = read_sweep(write_sweep(tmp_path, HEADS, losses, baseline=(4,)))
    arms = {f"n_heads={n}": losses[n,] for n in (1, 8)}
    expected = compare_family(arms, losses[4,], np.full(40, 32))
    found = compare_with_baseline(sweep)
    assert list(found) == ["n_heads=1", "n_heads=8"]
    for label, comparison in expected.items():
        assert found[label].difference.low == pytest.approx(comparison.difference.low, rel=1e-9)
        assert (found[label].verdict, found[label].unit) == (comparison.verdict, "nats per token")
        assert (found[label].alpha, found[label].stage) == (0.04, 1)
        assert (found[label].clusters, found[label].n_clusters) == ("blocks of windows", 20)
        assert found[label].detectable > 0 and "degrees of freedom" in found[label].remark


def test_best_validation_has_its_own_windows(tmp_path, losses):
    folder = write_sweep(tmp_path, HEADS, {(4,): losses[4,], (8,): losses[8,]})
    with np.load(folder / "model.n_heads=8,seed=0" / "windows_best.npz") as kept:
        arrays = dict(kept)
    np.savez(folder / "model.n_heads=8,seed=0" / "windows_best.npz", **arrays | {"nll": arrays["nll"] - 3 * 32})
    sweep = read_sweep(folder)
    final, best = (compare_with_baseline(sweep, which)["n_heads=8"].difference.mean for which in ("final", "best"))
    assert best == pytest.approx(final - 1)


def test_seeds_that_are_not_finished_in_both_are_left_out_and_named(tmp_path, losses):
    losses_by_run = {(4,): losses[4,], (8,): losses[8,] | {1: "failed", 3: 9.0}, (1,): {0: "failed", 1: "failed"}}
    found = compare_with_baseline(read_sweep(write_sweep(tmp_path, HEADS, losses_by_run)))
    expected = compare({0: losses[8,][0], 2: losses[8,][2]}, losses[4,], np.full(40, 32), n_comparisons=2)
    assert found["n_heads=8"].difference.low == pytest.approx(expected.difference.low, rel=1e-9)
    assert found["n_heads=8"].remark.endswith("Left out, because not finished in both: seed 1, 3.")
    assert (found["n_heads=1"].verdict, found["n_heads=1"].difference.n) == ("one seed", 0)
    assert (
        found["n_heads=1"].remark == "No seed is common to both. Left out, because not finished in both: seed 0, 1, 2."
    )


def test_windows_of_different_lengths_are_merged(tmp_path):
    """96 tokens are three windows of 32 or two of 48. The text ends within the sixth span."""
    generator, n_tokens = np.random.default_rng(1), 5 * 96 + 40
    tokens = {(length, seed): generator.gamma(3.0, size=n_tokens) for length in (32, 48) for seed in (0, 1, 2)}  # nats

    def cut(nll: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [nll[start : start + length] for start in range(0, n_tokens, length)]
        return np.array([part.mean() for part in parts]), np.array([len(part) for part in parts])

    for (length, seed), nll in tokens.items():
        means, targets = cut(nll, length)
        write_run(tmp_path / f"{length}-{seed}", means, config={}, seed=seed, context_length=length, targets=targets)
    spans = {key: cut(nll, 96) for key, nll in tokens.items()}
    sides = [{seed: spans[length, seed][0] for seed in (0, 1, 2)} for length in (48, 32)]
    expected = compare(*sides, spans[32, 0][1], n_comparisons=1)
    found = compare_with_baseline(read_sweep(tmp_path))["context_length=48"]
    assert len(spans[32, 0][1]) == 6 and found.unit == "nats per token"
    for name in ("mean", "low", "high"):
        assert getattr(found.difference, name) == pytest.approx(getattr(expected.difference, name), rel=1e-9)
    totals = [np.mean([tokens[length, seed].sum() / n_tokens for seed in (0, 1, 2)]) for length in (48, 32)]
    assert found.difference.mean == pytest.approx(totals[0] - totals[1])


def other_text(folder):
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"data_fingerprint": "another"}))


def text_unknown(folder):
    summary = json.loads((folder / "summary.json").read_text())
    del summary["data_fingerprint"]
    (folder / "summary.json").write_text(json.dumps(summary))


def no_windows(folder):
    (folder / "windows_last.npz").unlink()


def a_window_more(folder):
    np.savez(folder / "windows_last.npz", step=100, context_length=32, nll=np.full(41, 96.0), targets=np.full(41, 32))


@pytest.mark.parametrize(
    "change, reason",
    [
        (other_text, "their text or tokenizer differ, or were not recorded"),
        (text_unknown, "their text or tokenizer differ, or were not recorded"),
        (no_windows, "the losses of single windows were not kept"),
        (a_window_more, "their windows do not cover the same text"),
    ],
)
def test_runs_without_common_windows_are_compared_as_a_whole_in_bits_per_byte(tmp_path, losses, change, reason):
    folder = write_sweep(tmp_path, HEADS, {(4,): losses[4,], (8,): losses[8,]})
    change(folder / "model.n_heads=8,seed=1")
    if change is text_unknown:
        for run in folder.glob("model.n_heads=*,seed=[02]"):
            change(run)
        change(folder / "model.n_heads=4,seed=1")
    found = compare_with_baseline(read_sweep(folder))["n_heads=8"]
    differences = [bpb(losses[8,][seed].mean() - losses[4,][seed].mean()) for seed in (0, 1, 2)]
    half = 4.848732 * np.std(differences, ddof=1) / math.sqrt(3)  # t(0.98, 2)
    assert found.unit == "bits per byte" and found.remark.endswith(f"Compared as a whole, by seed alone: {reason}.")
    assert (found.clusters, found.n_clusters) == ("", 0)
    assert found.difference.mean == pytest.approx(np.mean(differences))
    assert found.difference.high - found.difference.mean == pytest.approx(half)


def test_the_final_and_the_best_validation_as_a_whole(tmp_path):
    losses_by_run = {(4,): {0: 3.0, 1: 3.1}, (8,): {0: 3.0, 1: 3.0}}
    more = {(8,): {"data_fingerprint": "another", "best_val_bpb": 1.0}, (4,): {"best_val_bpb": 1.5}}
    sweep = read_sweep(write_sweep(tmp_path, HEADS, losses_by_run, summary=more))
    final, best = (compare_with_baseline(sweep, which)["n_heads=8"] for which in ("final", "best"))
    assert final.difference.mean == pytest.approx(bpb(-0.05)) and best.difference.mean == -0.5
    assert final.unit == best.unit == "bits per byte"


def test_diverged_run_is_named(tmp_path, losses):
    losses_by_run = {(4,): losses[4,], (8,): losses[8,] | {1: np.full(40, np.nan)}}
    found = compare_with_baseline(read_sweep(write_sweep(tmp_path, HEADS, losses_by_run)))["n_heads=8"]
    assert (found.verdict, found.remark) == ("diverged", "The loss of the variant with seed 1 is not finite.")


def test_single_configuration_has_no_comparison(tmp_path):
    assert compare_with_baseline(read_sweep(write_sweep(tmp_path, HEADS, {(4,): {0: 3.0}}))) == {}
