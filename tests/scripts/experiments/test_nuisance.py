"""`sweep.tune`: what it refuses, lists and writes, and which value each run gets; and a sweep with real runs."""

import json
import math

import numpy as np
import pytest
import yaml

from tests.conftest import run_python
from tests.contract.harness import BARE, ROOT, merged
from tests.scripts.experiments.synthetic import command, index_of
from tril.model.runs import state_of
from tril.scripts.experiments import run_process
from tril.scripts.experiments.nuisance import read_tuning, tune_variant
from tril.scripts.experiments.sweep import read_sweep

VALUES = (0.5, 0.71, 1.0, 1.41, 2.0)
TUNE = "sweep.tune={optim.lr_scale:[0.5,0.71,1.0,1.41,2.0]}"
HEADS = "model.n_heads=1,2"
TRIAL_SEED = 1000
CHOOSING = np.arange(12) % 4 == 0  # the documents that choose
NAN = {"loss": 3.0, "documents": (np.full(12, np.nan), np.full(12, 100)), "final_val_loss": None}


@pytest.fixture
def training(processes):
    """Runs whose loss on the documents that choose is a parabola with its minimum at `best`; elsewhere at 1 / best."""

    def outcome(settings):
        assert not [key for key in settings if "tune" in key], "a run does not know that it was tuned"
        scale = float(settings["optim.lr_scale"])
        if scale in training.ends:
            return training.ends[scale]
        offset = math.log2(scale) - np.where(CHOOSING, 1, -1) * math.log2(training.best[settings["model.n_heads"]])
        return {"loss": 3.0, "seconds": 10.0, "documents": (3 + offset**2, np.full(12, 100))}

    training = processes(outcome)
    training.best, training.ends = {"1": 0.71, "2": 1.41, "4": 1.0}, {}
    return training


def started(training):
    """Heads, multiplier and seed of the new trials, and of the new runs."""
    words = ("model.n_heads", "optim.lr_scale", "seed")
    every = [tuple(float(settings.get(key, 0)) for key in words) for settings in training.started]
    training.started.clear()
    return [x[:2] for x in every if x[2] == TRIAL_SEED], [x for x in every if x[2] != TRIAL_SEED]


def test_each_variant_gets_the_value_of_its_best_trial_and_more_seeds_reuse_it(here, training):
    done = command(here, TUNE, HEADS, "seed=0,1")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 runs and 10 trials to train, about 00:23:20 of computing" in done.stdout
    trials, runs = started(training)
    assert trials == [(heads, scale) for heads in (1, 2) for scale in VALUES]
    assert runs == [(1, 0.71, 0), (1, 0.71, 1), (2, 1.41, 0), (2, 1.41, 1)]
    assert "tuned   model.n_heads=2,seed=0: lr_scale=1.41\n" in done.stdout
    index, [path] = index_of(here), here.glob("multirun/*/*/sweep.json")
    assert index["tune"] == {"optim.lr_scale": list(VALUES)} and len(index["trials"]) == 10
    assert index["trials"][0]["folder"] == "tune/model.n_heads=1/lr_scale=0.5"
    one, two = read_tuning(read_sweep(path.parent)).values()
    assert (one.chosen, two.chosen, one.edges) == ("lr_scale=0.71", "lr_scale=1.41", ())
    losses = [3 + (math.log2(scale) - math.log2(0.71)) ** 2 for scale in VALUES]
    assert list(one.losses.values()) == pytest.approx(losses)
    assert command(here, TUNE, "model.n_heads=1,4", "seed=1,2").returncode == 0
    trials, runs = started(training)
    assert trials == [(4, scale) for scale in VALUES] and runs == [(1, 0.71, 2), (4, 1.0, 1), (4, 1.0, 2)]

    training.best |= {"1": 3.0, "2": 1.0}
    other = command(here, "sweep.tune={optim.lr_scale:[0.5,1,2]}", HEADS, "seed=0,1")  # another sweep
    assert len(list(here.glob("multirun/*/*/sweep.json"))) == 2
    note = "(its lr_scale=2 is an end of the tuned range)"  # a better value may be outside
    assert f"n_heads=1: worse by 6.6820 ± 0.0000 nats per token {note}." in other.stdout
    assert f"| n_heads=1 | worse {note} |" in other.stdout


def test_failed_and_diverged_trials_are_the_worst_and_a_stopped_one_continues(here, training):
    ended, stopped = {0.5: NAN, 0.71: (1, "out of memory")}, {1.0: (128 + 15, "")}
    training.ends = ended | stopped
    assert command(here, TUNE).returncode == 1
    assert started(training) == ([(2, 0.5), (2, 0.71), (2, 1.0)], [])
    training.ends = ended
    assert command(here, TUNE).returncode == 0
    assert started(training) == ([(2, 0.71), (2, 1.0), (2, 1.41), (2, 2.0)], [(2, 1.41, 0)])  # a failed one again
    training.ends = dict.fromkeys(VALUES, (1, "out of memory"))
    done = command(here, TUNE, "hydra.sweep.dir=new")
    assert done.returncode == 1 and "all 5 trials failed or diverged, the first: out of memory" in done.stdout


def test_a_trial_that_another_job_has_ended_is_not_trained_again(here, training, monkeypatch):
    """While the first trial is trained, another job fails with the second."""
    trials = [
        {"folder": f"tune/{x}", "seed": TRIAL_SEED, "tuned": {"x": x}}
        | {"overrides": ["model.n_heads=1", f"seed={TRIAL_SEED}", f"optim.lr_scale={x}"]}
        for x in VALUES
    ]

    def spawn(arguments, log, lock):
        (second := here / trials[1]["folder"]).mkdir(exist_ok=True)
        (second / "failed.json").write_text("{}")
        return training(arguments, log, lock)

    monkeypatch.setattr(run_process, "spawn", spawn)
    assert tune_variant(here, trials) == {"x": 1.0}
    assert [scale for _, scale in started(training)[0]] == [0.5, 1.0, 1.41, 2.0]


@pytest.mark.slow
def test_parallel_jobs_tune_a_setting_and_keep_apart(here):
    """Each value is tried once; every fourth block of the validation windows chooses."""
    short = ("data=files", "data.path=text.txt", "trainer.max_steps=2", "trainer.val_check_interval=2")
    jobs = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "sweep.tune={optim.lr_scale:[0.5,2]}", "seed=0,1")
    command = (ROOT / "train.py", "-m", *merged(BARE, *short), "optim=adamw", *jobs)
    done = run_python(*command, cwd=here, TRIL_CACHE=str(here / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs and 2 trials to train, about 00:" in done.stdout
    assert done.stdout.count("start   tune/") == 2 and "2 of 2 runs are finished" in done.stdout
    [index], losses = here.glob("multirun/*/*/sweep.json"), {}
    for scale in (0.5, 2):
        arrays = np.load(index.parent / f"tune/configuration/lr_scale={scale}/windows_last.npz")
        assert len(arrays["document_nll"]) == 1 and len(arrays["nll"]) < 20  # so each window is a block
        losses[scale] = arrays["nll"][::4].sum() / arrays["targets"][::4].sum()
    names = [entry["folder"] for entry in json.loads(index.read_text())["runs"]]
    for name, other in zip(names, names[::-1], strict=True):
        folder, log = index.parent / name, (index.parent / name / "log.txt").read_text("utf-8")
        assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["lr_scale"] == min(losses, key=losses.get)
        assert state_of(folder) == "finished" and f"folder  {folder}\n" in log and other not in log
        assert len(list(folder.glob("csv/version_*"))) == 1
