"""`sweep.tune`: what it refuses, lists and writes, and which value each run gets."""

import threading
import time

import pytest

from tests.scripts.experiments.commands import index_of, sweep
from tests.scripts.experiments.fake_training import FakeTraining
from tril.model.runs import state_of
from tril.scripts.experiments import run_process
from tril.scripts.experiments.nuisance import read_tuning, tune_variant
from tril.scripts.experiments.sweep import read_sweep

VALUES = (0.5, 0.71, 1.0, 1.41, 2.0)
TUNE = "sweep.tune={optim.lr_scale:[0.5,0.71,1.0,1.41,2.0]}"


@pytest.fixture
def training(here, no_timing, monkeypatch):
    training = FakeTraining({1: 0.71, 2: 1.41, 4: 1.0})
    monkeypatch.setattr(run_process, "spawn", training.spawn)
    return training


def tuned_sweep(here, *overrides):
    return sweep(here, TUNE, "model.n_heads=1,2", "seed=0,1", *overrides)


def test_each_variant_gets_the_value_of_its_best_trial(here, training):
    done = tuned_sweep(here)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 runs and 10 trials to train, about 00:23:20 of computing" in done.stdout
    assert training.trials() == [(heads, scale) for heads in (1, 2) for scale in VALUES]
    assert training.runs() == [(1, 0.71, 0), (1, 0.71, 1), (2, 1.41, 0), (2, 1.41, 1)]
    assert "tuned   model.n_heads=2,seed=0: lr_scale=1.41\n" in done.stdout
    index = index_of(here)
    assert index["tune"] == {"optim.lr_scale": list(VALUES)} and len(index["trials"]) == 10
    assert index["trials"][0]["folder"] == "tune/model.n_heads=1/lr_scale=0.5"
    [path] = here.glob("multirun/*/*/sweep.json")
    found = read_tuning(read_sweep(path.parent))
    assert {label: tuning.chosen for label, tuning in found.items()} == {
        "n_heads=1": "lr_scale=0.71",
        "n_heads=2": "lr_scale=1.41",
    }
    assert found["n_heads=1"].losses == pytest.approx(
        dict(zip(map("lr_scale={}".format, VALUES), [3.2559, 3.0, 3.2441, 3.9799, 5.2325], strict=True)), abs=1e-3
    )
    assert not found["n_heads=1"].edges


def test_more_seeds_reuse_the_choice_and_more_variants_are_tuned(here, training):
    tuned_sweep(here)
    started = len(training.started)
    assert sweep(here, TUNE, "model.n_heads=1,4", "seed=1,2").returncode == 0
    assert training.trials()[10:] == [(4, scale) for scale in VALUES]
    assert training.runs()[4:] == [(1, 0.71, 2), (4, 1.0, 1), (4, 1.0, 2)]
    assert len(training.started) == started + 8 and len(index_of(here)["trials"]) == 15
    other = sweep(here, "sweep.tune={optim.lr_scale:[1,2]}", "model.n_heads=1,2", "seed=0,1")
    assert other.returncode == 0 and len(list(here.glob("multirun/*/*/sweep.json"))) == 2


def test_a_value_at_an_end_of_the_range_is_told(here, training):
    training.best = {1: 3.0, 2: 1.0}
    tuned_sweep(here)
    [path] = here.glob("multirun/*/*/sweep.json")
    assert [tuning.edges for tuning in read_tuning(read_sweep(path.parent)).values()] == [("lr_scale=2.0",), ()]
    done = sweep(here, TUNE, "model.n_heads=1,2", "seed=0,1")  # it is part of the verdict, in sentence and table
    note = "(its lr_scale=2.0 is an end of the tuned range)"
    assert f"n_heads=1: worse by 6.6820 ± 0.0000 nats per token {note}." in done.stdout
    assert f"| n_heads=1 | worse {note} |" in done.stdout


def test_failed_and_diverged_trials_are_the_worst_and_all_of_them_fail_the_run(here, training):
    training.outcomes = {0.71: "diverges", 0.5: "fails"}
    assert tuned_sweep(here).returncode == 0
    assert training.runs()[0] == (1, 1.0, 0)
    training.outcomes, training.started = dict.fromkeys(VALUES, "fails"), []
    done = tuned_sweep(here, "hydra.sweep.dir=new")
    assert done.returncode == 1 and "all 5 trials failed or diverged, the first: out of memory" in done.stdout
    training.outcomes = {}
    again = tuned_sweep(here, "hydra.sweep.dir=new")  # trains the failed trials again
    assert again.returncode == 0 and training.runs()[0] == (1, 0.71, 0), again.stdout


def test_a_stopped_trial_continues(here, training):
    training.outcomes = {1.0: "stopped"}
    assert tuned_sweep(here).returncode == 1
    assert training.runs() == []
    training.outcomes = {}
    assert tuned_sweep(here).returncode == 0
    assert [resumed for heads, scale, _, resumed in training.started if (heads, scale) == (1, 1.0)][-1]


def test_jobs_of_a_variant_share_its_trials(here, training, monkeypatch):
    """Three jobs at once: each trial is trained once, two or more at a time."""
    spawn, running, most, found = training.spawn, [], [], []
    overrides = ["model.n_heads=1", "seed=1000"]
    trials = [
        {"folder": f"tune/a/{x}", "seed": 1000, "tuned": {"x": x}, "overrides": [*overrides, f"optim.lr_scale={x}"]}
        for x in VALUES
    ]

    def slow(arguments, log, lock):
        running.append(log)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(log)
        return spawn(arguments, log, lock)

    monkeypatch.setattr(run_process, "spawn", slow)
    jobs = [threading.Thread(target=lambda: found.append(tune_variant(here, trials))) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=60)
    assert found == [{"x": 0.71}] * 3 and sorted(scale for _, scale in training.trials()) == list(VALUES)
    assert max(most) > 1 and all(state_of(here / trial["folder"]) == "finished" for trial in trials)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sweep.tune=lr"], "sweep.tune=lr must name settings with their values, such as sweep.tune={optim.lr_scale:"),
        (["sweep.tune={optim.lr_scale:[1]}"], "sweep.tune: optim.lr_scale=[1] must be a list of at least two values"),
        (["sweep.tune={model.n_heads:[1,2]}"], "model.n_heads is swept and in sweep.tune; leave out one of them"),
        ([TUNE, "seed=0,1000"], "seed=1000 is that of the trials of sweep.tune; choose other seeds"),
        (["sweep.tune={optim.lr_scal:[1,2]}"], "sweep.tune: there is no setting optim.lr_scal"),
        (["sweep.tune={optim.lr_scale:[1,-2]}"], "sweep.tune: optim.lr_scale=-2 must be greater than 0"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_trained(here, training, overrides, message):
    done = sweep(here, "model.n_heads=1,2", *overrides)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert training.started == [] and not (here / "multirun").exists()
