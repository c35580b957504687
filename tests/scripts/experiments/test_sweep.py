"""Sweeps read from folders in every state, their labels and baselines."""

import os

import pytest

from tests.scripts.experiments.synthetic import sweep_of, write_run, write_sweep
from tril.scripts.experiments.losses import losses_of
from tril.scripts.experiments.sweep import read_sweep

GRID = {(heads, window): {0: 3.0} for heads in (1, 4) for window in (8, None)}


def labels(sweep) -> list[str]:
    return [variant.label for variant in sweep.variants]


def test_settings_that_differ_are_the_swept_keys_of_a_folder_of_runs(tmp_path):
    def run(name, loss, seed, age=0, **config):
        usual = {"model.n_heads": 4, "optim.betas": [0.9, 0.95], "optim.lr": 0.1, "logger.save_dir": name}
        folder = write_run(tmp_path / "2026-01-01" / name, loss, usual | config, seed=seed)
        for file in folder.glob("*.*"):
            os.utime(file, (1e9 - age, 1e9 - age))
        return folder

    run("a", 3.0, 0, **{"model.n_heads": 16}), run("b", 3.0, 0, age=200)
    last = run("c", 3.0, 1)
    run("d", "unfinished", 0, **{"model.n_heads": 16, "optim.lr": 1e-3, "model.added_later": True})
    run("e", 3.0, 0, **{"optim.betas": [0.8, 0.95]})
    # Of the runs of one variant and seed, the newest finished one counts.
    newest = run("f", 3.0, 0, age=100), run("g", 3.0, 0, age=300), run("h", "unfinished", 0)
    (last / "wandb/files").mkdir(parents=True)  # a logger's, and a file of something else
    (last / "wandb/files/config.yaml").write_text("seed: 7\nmodel: {n_heads: 3}\n")
    (tmp_path / "config.yaml").write_text("theme: dark\n")
    sweep = read_sweep(tmp_path)
    assert sweep.keys == ("model.n_heads", "optim.betas", "optim.lr")
    assert labels(sweep) == [
        "n_heads=4, betas=[0.8,0.95], lr=0.1",
        "n_heads=4, betas=[0.9,0.95], lr=0.1",
        "n_heads=16, betas=[0.9,0.95], lr=0.001",
        "n_heads=16, betas=[0.9,0.95], lr=0.1",
    ]
    assert [[run.seed for run in variant.runs] for variant in sweep.variants] == [[0], [0, 1], [0], [0]]
    assert [run.folder for run in sweep.variants[1].runs] == [newest[0], last]
    assert sweep.baseline is sweep.variants[0]
    assert read_sweep(tmp_path, "betas=[0.9,0.95],n_heads=4").baseline is not sweep.baseline


def test_the_baseline_is_chosen_by_values_or_label_or_is_the_variant_that_agrees_most_with_the_defaults(tmp_path):
    four, two = (
        write_sweep(tmp_path / str(heads), GRID, ["model.n_heads", "model.window"], baseline=(heads, None))
        for heads in (4, 2)
    )
    for folder, asked, label in (
        (four, None, "n_heads=4, window=null"),
        (four, "model.n_heads=1", "n_heads=1, window=null"),  # the other key as without the sweep
        (four, " n_heads=1, model.window=8 ", "n_heads=1, window=8"),
        (two, None, "n_heads=1, window=null"),
    ):
        assert read_sweep(folder, asked).baseline.label == label
    with pytest.raises(ValueError, match="baseline=n_heads=2 is not a variant; choose one of: n_heads=1, window=8;"):
        read_sweep(four, "n_heads=2")
    with pytest.raises(ValueError, match="n_heads=1 matches several variants; .*: n_heads=1, window=8; n_heads=1, wi"):
        read_sweep(two / "..", "n_heads=1")
    keys = ["model.window", "model.kind", "optim.kind"]  # a label names a key by its last component if that is unique
    sweep = sweep_of(tmp_path / "kinds", {(None, True, 2): {0: 3.0}}, keys=keys, baseline=(8, 0, 0))
    assert labels(sweep) == ["window=null, model.kind=true, optim.kind=2"]


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "launches.jsonl").write_text("{")
    with pytest.raises(ValueError, match="launches.jsonl is damaged"):
        read_sweep(tmp_path)
    (tmp_path / "launches.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="neither launches.jsonl nor a run with config.yaml"):
        read_sweep(tmp_path)
    (write_run(tmp_path / "runs/a", 3.0) / "windows_last.npz").write_text("seed: [")
    with pytest.raises(ValueError, match="windows_last.npz is damaged"):
        losses_of(read_sweep(tmp_path / "runs"))
    (tmp_path / "runs/a/config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml"):
        read_sweep(tmp_path / "runs")
