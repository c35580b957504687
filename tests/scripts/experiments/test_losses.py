"""The losses that a sweep is compared on: their documents, their unit, and the level of the last launch."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.scripts.experiments.synthetic import sweep_of, write_sweep
from tril.model.comparison import compare
from tril.scripts.experiments.losses import compare_sweep, is_tuning, launch_alpha, losses_of, tuning_loss
from tril.scripts.experiments.sweep import read_sweep

SIZES = np.array([40, 0, 100, 30, 200, 50, 60, 80, 120, 300, 70, 230])  # targets of each document: 1280


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def documents_of(folder, sizes=SIZES) -> np.ndarray:
    """A sweep of 4 and 8 heads with 40 windows, whose runs kept the losses of documents: (2, 3, D) sums of losses."""
    chance = np.random.default_rng(0)
    losses = {(n,): {seed: 3 + 0.1 * chance.normal(size=40) for seed in (0, 1, 2)} for n in (4, 8)}
    write_sweep(folder, ["model.n_heads"], losses)
    sums = sizes * (3 + chance.normal(size=(2, 3, len(sizes))))
    for variant, heads in enumerate((4, 8)):
        for seed in range(3):
            path = folder / f"model.n_heads={heads},seed={seed}" / "windows_last.npz"
            with np.load(path) as kept:
                arrays = dict(kept)
            np.savez(path, **arrays, document_nll=sums[variant, seed], document_targets=sizes)
    return sums


def test_losses_are_those_of_documents_and_compared_at_the_level_of_the_first_launch(tmp_path):
    expected, kept = documents_of(tmp_path)[..., SIZES > 0], SIZES[SIZES > 0]
    sweep = read_sweep(tmp_path)
    found = losses_of(sweep)
    assert found.losses == pytest.approx(expected / kept) and found.sizes.tolist() == kept.tolist()
    assert (found.unit, found.documents) == ("nats per token", "11 documents")
    [comparison] = compare_sweep(found, sweep, margin=0.1).values()
    assert comparison == compare(found.losses, found.sizes, 0.04, 0.1)[0]


def test_few_documents_or_documents_that_differ_give_blocks_of_windows(tmp_path):
    documents_of(tmp_path / "few", np.array([100, 0, 300, 80, 200, 50, 60, 90, 300, 100]))
    documents_of(tmp_path / "other")
    path = tmp_path / "other" / "model.n_heads=8,seed=1" / "windows_last.npz"
    with np.load(path) as kept:
        arrays = dict(kept)
    np.savez(path, **arrays | {"document_targets": SIZES[::-1]})
    for name in ("few", "other"):
        found = losses_of(read_sweep(tmp_path / name))
        assert found.documents == "20 blocks of windows" and found.sizes.tolist() == [64] * 20


def test_windows_of_different_lengths_are_merged(tmp_path):
    short, long = np.arange(8.0), np.array([1.0, 2.0, 5.0, 9.0])
    sweep = sweep_of(tmp_path, {(1,): {0: short}, (4,): {0: long}}, context_length={(1,): 32, (4,): 64})
    found = losses_of(sweep)
    assert found.sizes.tolist() == [64] * 4 and found.losses[0, 0].tolist() == long.tolist()
    assert found.losses[1, 0].tolist() == [0.5, 2.5, 4.5, 6.5]


@pytest.mark.parametrize("by_document", [True, False])
def test_a_tuned_sweep_leaves_out_what_chose_its_settings(tmp_path, by_document):
    documents_of(tmp_path, SIZES if by_document else np.array([640, 640]))
    edit(tmp_path / "sweep.json", tune={})
    found = losses_of(read_sweep(tmp_path))
    kept = SIZES[SIZES > 0][~is_tuning(11)] if by_document else [64] * 15
    assert found.sizes.tolist() == list(kept)


def test_runs_of_another_text_are_compared_as_a_whole_in_bits_per_byte(tmp_path):
    documents_of(tmp_path)
    edit(tmp_path / "model.n_heads=8,seed=0" / "summary.json", data_fingerprint="another")
    sweep = read_sweep(tmp_path)
    found = losses_of(sweep)
    assert (found.unit, found.documents, found.losses.shape) == ("bits per byte", "the whole text", (2, 3, 1))
    assert found.losses[1, 2, 0] == sweep.others[0].runs[2].summary["final_val_bpb"]


def test_a_diverged_run_is_infinite_and_a_missing_one_nan(tmp_path):
    entries = {"final_val_loss": None, "diverged": "step 60 is not finite"}
    losses = {(4,): {0: 3.0, 1: 3.1}, (1,): {0: 2.0}, (8,): {0: 2.0, 1: "failed"}}
    sweep = sweep_of(tmp_path, losses, summary={(1,): entries})
    found = losses_of(sweep).losses
    assert np.isinf(found[1, 0]).all() and np.isnan(found[1, 1]).all() and np.isnan(found[2, 1]).all()
    assert [each.verdict for each in compare_sweep(losses_of(sweep), sweep).values()] == ["diverged", "one seed"]
    assert tuning_loss(sweep.others[0].runs[0]) == math.inf  # whatever its last validation was


def test_each_launch_has_its_level_and_an_unfinished_one_no_verdict(tmp_path):
    folder = tmp_path / "sweep"
    losses = {(4,): {0: 3.0, 1: 3.1, 2: 3.05}, (1,): {0: 4.0, 1: 4.11, 2: "unfinished"}}
    write_sweep(folder, ["model.n_heads"], losses)
    launches = [{"seeds": [0, 1], "date": "", "command": ""}, {"seeds": [2], "date": "", "command": ""}]
    edit(folder / "sweep.json", launches=launches)
    sweep = read_sweep(folder)
    [found] = compare_sweep(losses_of(sweep), sweep).values()
    assert (found.verdict, found.difference.low, found.seeds) == ("unfinished", None, 2)
    assert found.difference.mean == pytest.approx(1.005)
    (folder / "model.n_heads=1,seed=2" / "failed.json").write_text("{}")  # no run is left to train
    sweep = read_sweep(folder)
    [found] = compare_sweep(losses_of(sweep), sweep).values()
    half = 1 / math.tan(math.pi * 0.005 / 2) * 0.005  # Student's t with one degree of freedom, at 0.5 %
    assert found.verdict == "worse" and found.difference.half_width == pytest.approx(half)
    assert [launch_alpha(n) for n in (1, 2, 3)] == [0.04, 0.005, 0.0025]
    assert sum(launch_alpha(n) for n in range(1, 40)) < 0.05


def test_a_setting_is_tuned_on_every_fourth_document_or_block():
    documents = {"document_nll": np.arange(1.0, 13) * 10, "document_targets": np.array([10, *[5] * 11])}
    blocks = {"nll": np.repeat(np.arange(20.0), 2), "targets": np.ones(40), "context_length": np.array(1)}  # 20 of two

    def loss(**arrays):
        return tuning_loss(SimpleNamespace(state="finished", windows=lambda which: blocks | arrays))

    assert loss(**documents) == (10 + 50 + 90) / (10 + 5 + 5)
    few = {"document_nll": np.full(9, 1e6), "document_targets": np.full(9, 10)}
    assert loss() == loss(**few) == np.mean([0, 4, 8, 12, 16])
    assert all(0 < is_tuning(n).sum() <= n / 2 for n in range(2, 40))
