"""The losses that a sweep is compared on: their documents, their unit, and the level of the last launch."""

import numpy as np
import pytest

from tests.scripts.experiments.synthetic import HEADS, finish_run, sweep_of, write_run, write_sweep
from tril.model.comparison import compare
from tril.scripts.experiments.losses import compare_sweep, launch_alpha, losses_of
from tril.scripts.experiments.sweep import read_sweep

SIZES = np.array([40, 0, 100, 30, 200, 50, 60, 80, 120, 300, 70, 206])  # targets of each document, 40 windows of 32
CHANCE = np.random.default_rng(0).normal(size=(2, 3, 12))


def documents_of(folder, sizes=SIZES) -> np.ndarray:
    """A sweep of 1 and 4 heads with 3 seeds, whose runs kept the losses of documents: their means (2, 3, D)."""
    write_sweep(folder, HEADS)
    means = 3 + CHANCE[..., : len(sizes)]
    for (variant, seed), _ in np.ndenumerate(means[..., 0]):  # the baseline first
        run = folder / f"model.n_heads={(4, 1)[variant]},seed={seed}"
        finish_run(run, np.arange(40.0), documents=(means[variant, seed], sizes))
    return means


def test_losses_are_those_of_documents_and_compared_at_the_level_of_the_launch(tmp_path):
    expected, sizes = documents_of(tmp_path)[..., SIZES > 0], SIZES[SIZES > 0]
    found = losses_of(sweep := read_sweep(tmp_path))
    assert found.losses == pytest.approx(expected) and found.sizes.tolist() == sizes.tolist()
    assert (found.unit, found.documents) == ("nats per token", "11 documents")
    [comparison] = compare_sweep(found, sweep, margin=0.1).values()
    assert comparison == compare(found.losses, found.sizes, 0.04, 0.1)[0]
    launches = tmp_path / "launches.jsonl"
    launches.write_text(2 * launches.read_text())
    [comparison] = compare_sweep(found, read_sweep(tmp_path), margin=0.1).values()
    assert comparison == compare(found.losses, found.sizes, 0.005, 0.1)[0]
    assert sum(map(launch_alpha, range(1, 40))) < 0.05


def test_few_documents_or_documents_that_differ_give_blocks_of_windows(tmp_path):
    documents_of(tmp_path / "few", np.array([100, 0, 300, 80, 200, 50, 60, 90, 300, 100]))
    documents_of(tmp_path / "other")
    finish_run(tmp_path / "other/model.n_heads=1,seed=1", np.arange(40.0), documents=(CHANCE[0, 0], SIZES[::-1]))
    for name in ("few", "other"):
        found = losses_of(read_sweep(tmp_path / name))
        assert found.documents == "20 blocks of windows" and found.sizes.tolist() == [64] * 20
        assert found.losses[0, 0].tolist() == [2 * i + 0.5 for i in range(20)]
    short, long = np.arange(8.0), np.array([1.0, 2.0, 5.0, 9.0])  # windows of different lengths are merged
    found = losses_of(sweep_of(tmp_path, {(4,): {0: short}, (1,): {0: long}}, length={(4,): 32, (1,): 64}))
    assert found.sizes.tolist() == [64] * 4 and found.losses[1, 0].tolist() == long.tolist()
    assert found.losses[0, 0].tolist() == [0.5, 2.5, 4.5, 6.5]


def test_a_diverged_run_is_infinite_and_a_missing_one_nan(tmp_path):
    losses = {(4,): {0: 3.0, 1: 3.1}, (1,): {0: 2.0}, (8,): {0: 2.0, 1: "failed"}}
    diverged = {"final_val_loss": None, "diverged": "step 60 is not finite"}
    sweep = sweep_of(tmp_path, losses, summary={(1,): diverged})
    found = losses_of(sweep).losses
    assert np.isinf(found[1, 0]).all() and np.isnan(found[1, 1]).all() and np.isnan(found[2, 1]).all()
    assert [each.verdict for each in compare_sweep(losses_of(sweep), sweep).values()] == ["diverged", "one seed"]


@pytest.mark.parametrize(
    ("changed", "fingerprint", "more", "comparable"),
    [
        ({}, "a", {}, True),
        ({"data.batch_size": 8}, "a", {}, True),
        ({"data.tokenizer": {"kind": "char"}}, "b", {}, True),
        ({"data.token_budget": 1000}, "b", {}, True),
        ({"data.path": "other.txt"}, "b", {}, False),
        ({"data.path": "other.txt", "data.tokenizer": {"kind": "char"}}, "b", {}, False),
        ({"data.val_fraction": 0.2}, "b", {}, False),
        ({}, "b", {}, False),  # the content of the file has changed
        ({"data.tokenizer": {"kind": "char"}}, "b", {"val_bytes_per_token": 4.0}, False),
        ({}, "a", {"val_windows": {"scored": 4, "of": 8}}, False),
    ],
)
def test_only_runs_on_one_text_are_compared(changed, fingerprint, more, comparable, tmp_path):
    common = {"model.n_heads": 2, "data.path": "text.txt", "data.val_fraction": 0.1, "data.tokenizer": {"kind": "bpe"}}
    write_run(tmp_path / "a", 3.0, common)
    write_run(tmp_path / "b", 3.1, common | changed | {"model.n_heads": 4}, data_fingerprint=fingerprint, **more)
    found = losses_of(sweep := read_sweep(tmp_path))
    assert found.comparable is comparable and bool(compare_sweep(found, sweep)) is comparable
    if comparable and fingerprint == "b":
        final = sweep.others[0].runs[0].summary["final_val_bpb"]
        assert found.unit == "bits per byte" and found.losses[1, 0, 0] == final
