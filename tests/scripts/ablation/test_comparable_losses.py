"""Which clusters of the text a sweep's runs are compared on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.scripts.ablation.synthetic import write_sweep
from tril.scripts.ablation.comparable_losses import comparable_losses
from tril.scripts.ablation.comparisons import compare_with_baseline
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.tuning_text import is_tuning

SIZES = np.array([40, 0, 100, 30, 200, 50, 60, 80, 120, 300, 70, 230])  # targets of each document: 1280


def documents_of(folder, sizes=SIZES, n_variants=2) -> dict[str, np.ndarray]:
    """A sweep of 40 windows whose runs also kept the losses of documents; run -> sums of losses of the documents."""
    generator = np.random.default_rng(0)
    losses = {(n,): {seed: 3 + 0.1 * generator.normal(size=40) for seed in (0, 1, 2)} for n in (4, 8, 16)[:n_variants]}
    write_sweep(folder, ["model.n_heads"], losses)
    sums = {}
    for path in sorted(folder.glob("*/windows_last.npz")):
        sums[path.parent.name] = sizes * (3 + generator.normal(size=len(sizes)))
        with np.load(path) as kept:
            arrays = dict(kept)
        np.savez(path, **arrays, document_nll=sums[path.parent.name], document_targets=sizes)
    return sums


def test_clusters_are_documents(tmp_path):
    sums = documents_of(tmp_path)
    [found] = comparable_losses(read_sweep(tmp_path), "final")
    assert (found.clusters, found.unit, found.compared) == ("documents", "nats per token", ("n_heads=8",))
    assert found.targets.tolist() == SIZES[SIZES > 0].tolist()
    for seed in (0, 1, 2):
        for name, arm in (("model.n_heads=8", found.arms["n_heads=8"]), ("model.n_heads=4", found.baseline)):
            expected = sums[f"{name},seed={seed}"][SIZES > 0] / SIZES[SIZES > 0]
            assert arm[seed] == pytest.approx(expected)
    comparison = compare_with_baseline(read_sweep(tmp_path))["n_heads=8"]
    assert (comparison.clusters, comparison.n_clusters) == ("documents", 11)
    assert comparison.effective_clusters == pytest.approx(1280**2 / np.sum(SIZES**2))
    means = [sum(sums[f"model.n_heads={n},seed={seed}"].sum() for seed in range(3)) / 3 / 1280 for n in (8, 4)]
    assert comparison.difference.mean == pytest.approx(means[0] - means[1])


def test_few_documents_are_no_clusters(tmp_path):
    documents_of(tmp_path, np.array([100, 0, 300, 80, 200, 50, 60, 90, 300, 100]))
    [found] = comparable_losses(read_sweep(tmp_path), "final")
    assert found.clusters == "blocks of windows" and found.targets.tolist() == [64] * 20


def test_one_run_without_documents_gives_blocks_for_all(tmp_path):
    documents_of(tmp_path)
    path = tmp_path / "model.n_heads=8,seed=1" / "windows_last.npz"
    with np.load(path) as kept:
        arrays = {name: kept[name] for name in ("step", "context_length", "nll", "targets")}
    np.savez(path, **arrays)
    [found] = comparable_losses(read_sweep(tmp_path), "final")
    assert found.clusters == "blocks of windows"


def test_documents_of_other_sizes_give_blocks(tmp_path):
    documents_of(tmp_path)
    path = tmp_path / "model.n_heads=8,seed=1" / "windows_last.npz"
    with np.load(path) as kept:
        arrays = dict(kept)
    np.savez(path, **arrays | {"document_targets": SIZES[::-1]})
    [found] = comparable_losses(read_sweep(tmp_path), "final")
    assert found.clusters == "blocks of windows"


@pytest.mark.parametrize("by_document", [True, False])
def test_a_tuned_sweep_leaves_out_what_chose_its_rates(tmp_path, by_document):
    documents_of(tmp_path, SIZES if by_document else np.array([640, 640]))
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tune": {"multipliers": [1.0]}}))
    [found] = comparable_losses(read_sweep(tmp_path), "final")
    if by_document:
        kept = ~is_tuning(12) & (SIZES > 0)
        assert found.targets.tolist() == SIZES[kept].tolist() == [100, 30, 50, 60, 80, 300, 70, 230]
    else:
        assert found.targets.tolist() == [64] * 15


def test_a_variant_of_another_text_is_compared_as_a_whole_and_the_others_by_cluster(tmp_path):
    documents_of(tmp_path, n_variants=3)
    for folder in tmp_path.glob("model.n_heads=16,*"):
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"data_fingerprint": "another"}))
    sweep = read_sweep(tmp_path)
    by_cluster, whole = comparable_losses(sweep, "final")
    assert (by_cluster.compared, whole.compared) == (("n_heads=8",), ("n_heads=16",))
    assert set(whole.arms) == {"n_heads=8", "n_heads=16"}  # both tell about the variance between seeds
    found = compare_with_baseline(sweep, margin=0.1)
    assert [found[f"n_heads={n}"].unit for n in (8, 16)] == ["nats per token", "bits per byte"]
    assert [found[f"n_heads={n}"].df for n in (8, 16)] == [2, 4]
    assert [found[f"n_heads={n}"].margin for n in (8, 16)] == [0.1, None]  # a margin is in nats per token
    two = replace(sweep, variants=sweep.variants[:2])
    assert found["n_heads=8"].difference.high > compare_with_baseline(two)["n_heads=8"].difference.high


def test_without_finished_runs_there_is_nothing_to_compare(tmp_path):
    write_sweep(tmp_path, ["model.n_heads"], {(4,): {0: 3.0}, (8,): {0: "failed"}})
    [found] = comparable_losses(read_sweep(tmp_path), "final")
    assert (dict(found.arms), dict(found.baseline), found.clusters) == ({"n_heads=8": {}}, {}, "")
    assert compare_with_baseline(read_sweep(tmp_path))["n_heads=8"].verdict == "one seed"
