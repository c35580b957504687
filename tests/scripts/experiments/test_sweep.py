"""Sweeps read from folders in every state, their labels and baselines."""

import io
import json
import os
import zipfile

import numpy as np
import pytest

from tests.scripts.experiments.synthetic import sweep_of, write_run, write_sweep
from tril.scripts.experiments.losses import losses_of
from tril.scripts.experiments.sweep import read_launches, read_sweep

KEYS, GRID = ["model.n_heads", "model.window"], {(n, window): {0: 3.0} for n in (1, 4) for window in (8, None)}
USUAL = {"model.n_heads": 4, "optim.betas": [0.9, 0.95], "logger.save_dir": "a"}


@pytest.fixture
def runs(tmp_path):
    """Runs in a folder, and further files named config.yaml."""
    write_run(tmp_path / "day/a", 3.0, USUAL | {"model.n_heads": 16})
    write_run(tmp_path / "day/b", "unfinished", USUAL | {"optim.betas": [0.8, 0.95], "model.added_later": True})
    last = write_run(tmp_path / "day/c", 3.0, USUAL | {"logger.save_dir": "c"}, seed=1)
    (last / "wandb/files").mkdir(parents=True)  # a logger's
    (last / "wandb/files/config.yaml").write_text("seed: 7\nmodel: {n_heads: 3}\n")
    (tmp_path / "config.yaml").write_text("theme: dark\n")  # of something else
    return tmp_path


def test_settings_that_differ_are_the_swept_keys_of_a_folder_of_runs(runs):
    sweep = read_sweep(runs)
    assert sweep.keys == ("model.n_heads", "optim.betas") and sweep.baseline is sweep.variants[0]
    labels = ["n_heads=4, betas=[0.8,0.95]", "n_heads=4, betas=[0.9,0.95]", "n_heads=16, betas=[0.9,0.95]"]
    assert [variant.label for variant in sweep.variants] == labels
    assert [[run.seed for run in variant.runs] for variant in sweep.variants] == [[0], [1], [0]]
    assert read_sweep(runs, "betas=[0.9,0.95],n_heads=4").baseline.label == labels[1]


def test_of_runs_with_one_seed_the_newest_finished_one_counts(runs):
    for name, loss, age in (("d", 3.0, 200), ("e", 3.0, 100), ("f", 3.0, 300), ("g", "unfinished", 0)):
        for file in write_run(runs / "day" / name, loss, USUAL).glob("*.*"):
            os.utime(file, (1e9 - age, 1e9 - age))
    assert [run.folder.name for run in read_sweep(runs).variants[1].runs] == ["e", "c"]


@pytest.mark.parametrize(
    ("asked", "label"),
    [
        (None, "n_heads=4, window=null"),
        ("model.n_heads=1", "n_heads=1, window=null"),  # the other key as without the sweep
        (" n_heads=1, model.window=8 ", "n_heads=1, window=8"),
    ],
)
def test_the_baseline_is_chosen_by_values(asked, label, tmp_path):
    folder = write_sweep(tmp_path, GRID, KEYS, baseline=(4, None))
    assert read_sweep(folder, asked).baseline.label == label
    with pytest.raises(ValueError, match="baseline=n_heads=2 .*n_heads=1, window=8;"):
        read_sweep(folder, "n_heads=2")


@pytest.mark.parametrize(
    ("summary", "flops"), [({"flops_per_token": None}, None), ({"tokens": None}, None), ({}, 6000 * 6400)]
)
def test_the_flops_of_training_need_both_figures(summary, flops, tmp_path):
    run = sweep_of(tmp_path, {(4,): {0: 3.0}}, summary={(4,): summary}).runs[0]
    assert run.summary.get("training_flops") == flops


def test_a_label_names_a_key_by_its_last_component_if_that_is_unique(tmp_path):
    keys = ["model.window", "model.kind", "optim.kind"]
    sweep = sweep_of(tmp_path, {(None, True, 2): {0: 3.0}}, keys=keys, baseline=(8, 0, 0))
    assert sweep.baseline.label == "window=null, model.kind=true, optim.kind=2"


def arrays(shape: tuple, **others) -> bytes:
    """windows_last.npz, whose "nll" says that it has this shape."""
    file, header = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    np.savez(file, **{"targets": np.full(8, 32), "context_length": 32} | others)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("nll.npy", header.getvalue() + bytes(64))
    return file.getvalue()


LAUNCH = {"date": "", "command": "", "seeds": [], "family": "", "swept": [], "baseline": {}, "runs": []}
RUN = {"folder": [1], "values": {}, "seed": 0, "arguments": []}
DAMAGED = [  # tests/model/test_runs.py has more of them, of a single run
    *((name, b"a: [") for name in ("launches.jsonl", "day/a/windows_last.npz", "day/a/config.yaml")),
    *(("day/a/windows_last.npz", arrays(shape)) for shape in ((7,), (8, 1), (10**13,))),
    *(("day/a/windows_last.npz", arrays((n,), targets=np.full(n, size))) for n, size in ((0, 1), (8, 0), (8, -1))),
    *(("day/a/windows_last.npz", arrays((8,), context_length=x)) for x in (0, "32", [32, 32])),
    *(("launches.jsonl", json.dumps(x).encode()) for x in ([], LAUNCH | {"runs": 3}, LAUNCH | {"runs": [RUN]})),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files_are_named(name, content, runs):
    (runs / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        losses_of(read_sweep(runs))


@pytest.mark.parametrize("key", ["date", "command", "seeds", "family", "swept", "baseline", "folder", "arguments"])
def test_a_launch_without_one_of_its_entries_is_damaged(key, tmp_path):
    folder = write_sweep(tmp_path, {(1,): {0: 3.0}})
    path = folder / "launches.jsonl"
    path.write_text(path.read_text().replace(f'"{key}"', f'"_{key}"'))
    with pytest.raises(ValueError, match=r"launches.jsonl is damaged"):
        read_launches(folder)
