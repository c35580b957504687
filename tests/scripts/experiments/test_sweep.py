"""Sweeps read from folders in every state, their labels and baselines."""

import json
import os

import pytest

from tests.scripts.experiments.synthetic import write_run, write_sweep
from tril.scripts.experiments.losses import losses_of
from tril.scripts.experiments.sweep import read_sweep

HEADS = ["model.n_heads"]


def labels(sweep) -> list[str]:
    return [variant.label for variant in sweep.variants]


def test_a_sweep_in_every_state(tmp_path):
    losses = {(4,): {1: 3.5, 0: 3.0}, (1,): {0: "failed", 1: "unfinished", 2: "not started"}}
    sweep = read_sweep(write_sweep(tmp_path, HEADS, losses, context_length={(4,): 32, (1,): 64}))
    assert (sweep.folder, sweep.keys, labels(sweep)) == (tmp_path, ("model.n_heads",), ["n_heads=4", "n_heads=1"])
    four, one = sweep.variants
    assert (
        four.values == {"model.n_heads": 4} and [run.seed for run in four.runs] == [0, 1] and four.finished == four.runs
    )
    assert [(run.seed, run.state) for run in one.runs] == [
        (0, "failed"),
        (1, "unfinished"),
        (2, "not started"),
    ] and one.finished == ()

    run = four.runs[1]
    assert run.folder == tmp_path / "model.n_heads=4,seed=1" and run.summary["final_val_loss"] == 3.5
    assert run.planned["overrides"] == ["model.n_heads=4", "seed=1"] and run.figure("parameters") == 1000
    last, best = run.windows("final"), run.windows("best")
    assert last["nll"].tolist() == [3.5 * 32] * 8 and last["targets"].tolist() == [32] * 8
    assert best["nll"].tolist() == pytest.approx([3.49 * 32] * 8)
    assert run.curves["val"].tolist() == [[1600, 4.5], [3200, 3.8], [4800, 3.49], [6400, 3.5]]

    failed, unfinished, waiting = one.runs
    assert (failed.message, failed.summary, failed.windows("final")) == ("RuntimeError: out of memory", {}, None)
    assert failed.curves["val"].tolist() == unfinished.curves["val"].tolist() == [[1600, 5]]
    assert waiting.planned["seed"] == 2 and waiting.curves["train"].shape == (0, 2)


def test_settings_that_differ_are_the_swept_keys_of_a_folder_of_runs(tmp_path):
    def run(name, loss, seed, **config):
        usual = {
            "model.n_heads": 4,
            "optim.betas": [0.9, 0.95],
            "optim.lr": 0.1,
            "data.source": "stdlib",
            "logger.save_dir": name,
        }
        return write_run(tmp_path / "2026-01-01" / name, loss, config=usual | config, seed=seed)

    run("a", 3.0, 0, **{"model.n_heads": 16})
    run("b", 3.0, 0)
    last = run("c", 3.0, 1)
    run("d", "unfinished", 0, **{"model.n_heads": 16, "optim.lr": 1e-3, "model.added_later": True})
    run("e", 3.0, 0, **{"optim.betas": [0.8, 0.95]})
    (last / "wandb" / "files").mkdir(parents=True)
    (last / "wandb" / "files" / "config.yaml").write_text("seed: 7\nmodel: {n_heads: 3}\n")
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
    assert sweep.baseline is sweep.variants[0] and sweep.variants[1].runs[1].planned == {}
    assert read_sweep(tmp_path, "betas=[0.9,0.95],n_heads=4").baseline.label == "n_heads=4, betas=[0.9,0.95], lr=0.1"


def test_of_two_runs_of_one_variant_and_seed_the_newest_finished_one_counts(tmp_path):
    runs = [
        write_run(tmp_path / name, loss, config={}, seed=0)
        for name, loss in [("a", 3.0), ("b", 2.0), ("c", 1.0), ("d", "unfinished")]
    ]
    for run, age in zip(runs, [300, 100, 200, 0], strict=True):
        for file in (run / "config.yaml", run / "summary.json"):
            if file.exists():
                os.utime(file, (1e9 - age, 1e9 - age))
    [chosen] = read_sweep(tmp_path).variants[0].runs
    assert chosen.folder == tmp_path / "b"


def test_labels_name_keys_by_their_last_component_if_it_is_unique(tmp_path):
    values = {(None, True, "a", 2): {0: 3.0}, (8, False, "b", 1): {0: 3.0}}
    sweep = read_sweep(write_sweep(tmp_path, ["model.window", "model.bias", "model.kind", "optim.kind"], values))
    assert labels(sweep) == [
        "window=null, bias=true, model.kind=a, optim.kind=2",
        "window=8, bias=false, model.kind=b, optim.kind=1",
    ]


HEADS_AND_WINDOW = ["model.n_heads", "model.window"]
GRID = {(heads, window): {0: 3.0} for heads in (1, 4) for window in (8, None)}


def test_the_baseline_is_chosen_by_values_or_label_or_is_the_variant_that_agrees_most_with_the_defaults(tmp_path):
    four, two = (write_sweep(tmp_path / f"{heads}", HEADS_AND_WINDOW, GRID, baseline=(heads, None)) for heads in (4, 2))
    for folder, asked, label in (
        (four, None, "n_heads=4, window=null"),
        (four, "model.n_heads=1", "n_heads=1, window=null"),  # the other key as without the sweep
        (four, "window=8", "n_heads=4, window=8"),
        (four, " n_heads=1, model.window=8 ", "n_heads=1, window=8"),
        (two, None, "n_heads=1, window=null"),
    ):
        assert read_sweep(folder, asked).baseline.label == label
    every = "n_heads=1, window=8; n_heads=1, window=null; n_heads=4, window=8; n_heads=4, window=null"
    for asked in ("n_heads=2", "heads=4", "", "n_heads=1,lr=3"):
        with pytest.raises(ValueError, match=f"baseline={asked} is not a variant; choose one of: {every}"):
            read_sweep(four, asked)
    for name, values in (("a", (1, 2)), ("b", (1, 3)), ("c", (2, 3))):
        config = dict(zip(("model.n_heads", "model.dim"), values, strict=True))
        write_run(tmp_path / "runs" / name, 3.0, config=config, seed=0)
    several = "baseline=n_heads=1 matches several variants; choose one of: n_heads=1, dim=2; n_heads=1, dim=3$"
    with pytest.raises(ValueError, match=several):
        read_sweep(tmp_path / "runs", "n_heads=1")


def test_folder_without_a_sweep_is_refused_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        read_sweep(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds neither a sweep.json with runs nor a run with config.yaml"):
        read_sweep(tmp_path)
    for text, message in {
        "{": "is not valid JSON",
        "[]": "is not a list of runs",
        "{}": "is not a list of runs",
        json.dumps(
            {"swept": ["a"], "baseline": {}, "runs": [{"folder": "x", "seed": 0, "values": {}}]}
        ): "is not a list of runs",
        json.dumps({"swept": [], "baseline": {}, "runs": []}): "holds neither a sweep.json with runs",
    }.items():
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises((ValueError, OSError), match=message) as error:
            read_sweep(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["summary.json", "windows_last.npz", "config.yaml"])
def test_damaged_file_of_a_run_is_named(tmp_path, name):
    folder = write_run(tmp_path / "a", 3.0, config={}, seed=0)
    (folder / name).write_text("seed: [")
    with pytest.raises(ValueError, match=name):
        losses_of(read_sweep(tmp_path))
