"""The trials of one arm, with losses that are a known function: what is chosen, from which text, by how many trials."""

import json
import math
import threading
import time

import numpy as np
import pytest

from tests.scripts.experiments.fake_training import TRIAL_SEED, FakeTraining
from tril.model.atomic_files import write_json
from tril.model.runs import state_of
from tril.scripts.experiments import run_process, tuning
from tril.scripts.experiments.tune_settings import TuneConfig
from tril.scripts.experiments.tuning import TuningFailed, retry_failed, tune_arm

ROOT2 = (0.5, 0.71, 1.0, 1.41, 2.0)  # the default multipliers
ARM = "tune/model.n_heads=2"
OVERRIDES = ["model.n_heads=2", "+tune=lr", "tune.extend=2", "seed=0"]


def config(multipliers=ROOT2, seeds=(TRIAL_SEED,), extend=2) -> TuneConfig:
    return TuneConfig(multipliers=multipliers, seeds=seeds, extend=extend)


@pytest.fixture
def training(monkeypatch):
    training = FakeTraining({2: 1.41})
    monkeypatch.setattr(run_process, "spawn", training.spawn)
    monkeypatch.setattr(run_process, "LOCK_POLL_SECONDS", 0.01)
    return training


def tune(sweep, settings=None):
    return tune_arm(sweep, ARM, OVERRIDES, settings or config())


def chosen(sweep) -> dict:
    return json.loads((sweep / ARM / "chosen.json").read_text())


def scales(training) -> list[float]:
    return [scale for _, scale, _, _ in training.started]


def test_multiplier_is_the_best_one_on_the_tuning_text(tmp_path, training):
    """The text that a report compares, and the text as a whole, would choose 0.71."""
    assert tune(tmp_path) == 1.41
    assert training.started == [(2, scale, TRIAL_SEED, False) for scale in ROOT2]
    found = chosen(tmp_path)
    curve = dict(found.pop("curve"))
    assert curve == {scale: pytest.approx(3 + math.log2(scale / 1.41) ** 2) for scale in ROOT2}
    assert found == {
        "lr_scale": 1.41,
        "at_edge": False,
        "trials": 5,
        "failed": 0,
        "seconds": 50,
        "training_flops": 1750,
    }


@pytest.mark.parametrize(
    ("best", "extend", "tried", "found", "at_edge"),
    [
        (3.0, 2, [2.84, 4.03], 2.84, False),
        (100.0, 2, [2.84, 4.03], 4.03, True),
        (100.0, 0, [], 2.0, True),
        (0.3, 3, [0.352, 0.248], 0.352, False),
        (1.0, 2, [], 1.0, False),
    ],
)
def test_range_is_extended_beyond_a_best_end(best, extend, tried, found, at_edge, tmp_path, training, capsys):
    """By one step of the same ratio, at most `extend` times: 2 * 2 / 1.41 = 2.84, 0.5 * 0.5 / 0.71 = 0.352."""
    training.best = {2: best}
    assert tune(tmp_path, config(extend=extend)) == found
    assert scales(training) == [*ROOT2, *tried]
    assert (chosen(tmp_path)["at_edge"], chosen(tmp_path)["trials"]) == (at_edge, 5 + len(tried))
    assert ("an end of the range: a better one may be outside of it" in capsys.readouterr().out) == at_edge


def test_failed_and_diverged_trials_are_the_worst(tmp_path, training, capsys):
    training.outcomes = {1.41: "fails", 2.0: "diverges"}
    assert tune(tmp_path) == 1.0
    assert f"FAILED  {ARM}/lr_scale=1.41,seed=1000: out of memory (status 1" in capsys.readouterr().out
    curve = dict(chosen(tmp_path)["curve"])
    assert [scale for scale, loss in curve.items() if loss is None] == [1.41, 2.0] and chosen(tmp_path)["failed"] == 1


def test_arm_without_a_loss_has_no_multiplier_and_is_tried_again_by_a_new_launch(tmp_path, training):
    training.outcomes = dict.fromkeys(ROOT2, "fails") | {0.5: "diverges"}
    for _ in range(2):  # the other jobs of the arm train nothing again
        with pytest.raises(TuningFailed, match=f"all 5 trials of {ARM} failed or diverged, the first: out of memory"):
            tune(tmp_path)
    assert len(training.started) == 5 and not (tmp_path / ARM / "chosen.json").exists()
    training.outcomes = {}
    retry_failed(tmp_path / ARM)
    assert tune(tmp_path) == 1.41 and scales(training)[5:] == [0.71, 1.0, 1.41, 2.0]


def test_the_mean_over_the_seeds_of_the_trials_decides(tmp_path, training, monkeypatch):
    """1 wins with seed 7, and 1.41 with both."""
    extra = {(1.0, 7): -1.0, (1.0, 8): 3.0}
    finish = training.finish

    def noisy(folder, heads, scale, diverged):
        finish(folder, heads, scale, diverged)
        seed = int(folder.name.rpartition("=")[2])
        arrays = dict(np.load(folder / "windows_last.npz"))
        arrays["document_nll"] = arrays["document_nll"] + 100 * extra.get((scale, seed), 0.0)
        np.savez(folder / "windows_last.npz", **arrays)

    monkeypatch.setattr(training, "finish", noisy)
    assert tune(tmp_path / "one", config(seeds=(7,))) == 1.0
    assert tune(tmp_path / "two", config(seeds=(7, 8))) == 1.41
    assert chosen(tmp_path / "two")["trials"] == 10


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_finished_trials_are_kept_and_the_interrupted_one_is_resumed(how, tmp_path, training):
    training.outcomes = {1.0: how}
    if how == "killed":
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path)
    else:
        assert tune(tmp_path) is None
    assert state_of(tmp_path / ARM / "lr_scale=1,seed=1000") == "unfinished"
    training.outcomes = {}
    assert tune(tmp_path) == 1.41
    assert [(scale, resumed) for _, scale, _, resumed in training.started] == [
        (0.5, False), (0.71, False), (1.0, False), (1.0, True), (1.41, False), (2.0, False)]  # fmt: skip
    assert tune(tmp_path) == 1.41 and len(training.started) == 6


def test_jobs_of_an_arm_share_its_trials(tmp_path, training, monkeypatch):
    """Three jobs at once: each trial is trained once, two or more at a time, and one job writes the choice."""
    training.best = {2: 3.0}  # with two extensions, for which two jobs wait for the third one
    spawn, running, most, found, written = training.spawn, [], [], [], []

    def slow(arguments, log, lock):
        running.append(log)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(log)
        return spawn(arguments, log, lock)

    def slow_write(path, content):
        written.append(path)
        time.sleep(0.05)
        write_json(path, content)

    monkeypatch.setattr(run_process, "spawn", slow)
    monkeypatch.setattr(tuning, "write_json", slow_write)
    jobs = [threading.Thread(target=lambda: found.append(tune(tmp_path))) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=60)
    assert found == [2.84] * 3 and sorted(scales(training)) == [*ROOT2, 2.84, 4.03] and max(most) > 1
    assert len(written) == 1
