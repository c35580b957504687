"""`train.py -m ... +tune=lr`: what it refuses, lists and writes, and which multiplier each run gets."""

import json
import re

import pytest
from omegaconf import OmegaConf

from tests.calls import call
from tests.conftest import assert_refused
from tests.runs import TINY, typed
from tests.scripts.experiments.commands import index_of, sweep
from tests.scripts.experiments.fake_training import FakeTraining
from tril import train
from tril.scripts.cli.command_line import compose
from tril.scripts.cli.errors import UserError
from tril.scripts.experiments import run_process
from tril.scripts.experiments.launch import family_of
from tril.scripts.experiments.tune_settings import read_tune

ROOT2 = [0.5, 0.71, 1.0, 1.41, 2.0]
CHANGES = ("tune.multipliers=[1,2]", "tune.seeds=[1001]", "tune.extend=1")


@pytest.fixture
def training(here, no_timing, monkeypatch):
    training = FakeTraining({1: 0.71, 2: 1.41, 4: 1.0})
    monkeypatch.setattr(run_process, "spawn", training.spawn)
    return training


def composed(*settings):
    """As Hydra gives them to its callback."""
    return OmegaConf.create(compose("train", typed(*settings)).settings)


def rows(done) -> list[list[str]]:
    """The table before the start."""
    return [re.split(r"\s{2,}", line.strip()) for line in done.stdout.partition("\n\n")[0].splitlines()]


def test_each_arm_is_tuned_once_and_its_runs_get_its_multiplier(here, training):
    done = sweep(here, "model.n_heads=1,2", "seed=0", "+tune=lr")
    assert done.returncode == 0, done.stdout + done.stderr
    header, *table = rows(done)
    assert header[-2:] == ["tuning", "so far"] and [row[5] for row in table] == ["5 trials, 00:08:20"] * 2
    more = "(at most 4 more, if a best multiplier is an end of the range)"
    assert f"2 of 2 runs and 10 trials of learning rates {more} to train, about 00:20:00 of computing" in done.stdout
    assert training.trials() == [(heads, scale) for heads in (1, 2) for scale in ROOT2]
    assert training.runs() == [(1, 0.71, 0), (2, 1.41, 0)]

    index = index_of(here)
    assert index["tune"].items() >= {"multipliers": ROOT2, "seeds": [1000], "extend": 2}.items()
    trials = index["tune"]["trials"]
    assert [(trial["values"]["model.n_heads"], trial["lr_scale"]) for trial in trials] == training.trials()
    assert trials[1]["folder"] == "tune/model.n_heads=1/lr_scale=0.71,seed=1000" and trials[1]["seed"] == 1000
    assert [entry["tuning"] for entry in index["cells"]] == ["tune/model.n_heads=1", "tune/model.n_heads=2"]

    # more seeds and one more value, which needs the range to be extended
    training.started.clear()
    training.best[4] = 3.0
    again = sweep(here, "model.n_heads=2,4", "seed=0,1", "+tune=lr")
    assert [row[5] for row in rows(again)[1:]] == ["lr_scale 1.41", "5 trials, 00:08:20"]
    assert training.trials() == [(4, scale) for scale in [*ROOT2, 2.84, 4.03]]
    assert training.runs() == [(2, 1.41, 1), (4, 2.84, 0), (4, 2.84, 1)]
    trials = index_of(here)["tune"]["trials"]
    assert [trial["lr_scale"] for trial in trials if trial["values"]["model.n_heads"] == 4] == [*ROOT2, 2.84, 4.03]
    assert len(trials) == 17


def test_runs_of_an_arm_without_a_loss_fail_and_the_same_command_tries_again(here, training):
    training.outcomes = dict.fromkeys((1.0, 2.0), "fails")
    command = ("model.n_heads=2", "seed=1", "+tune=lr", "tune.multipliers=[1,2]")
    done = sweep(here, *command)
    assert done.returncode == 1 and training.runs() == [] and len(training.trials()) == 2
    assert "NOT finished: seed=1 (failed); start the same command again" in done.stdout
    [failed] = here.glob("multirun/*/*/seed=1/failed.json")
    message = "all 2 trials of tune/configuration failed or diverged, the first: out of memory"
    assert json.loads(failed.read_text())["message"] == message and f"FAILED  seed=1: {message}\n" in done.stdout
    training.outcomes = {}
    assert sweep(here, *command).returncode == 0 and training.runs() == [(2, 1.0, 1)]


def test_settings_of_the_tuning_are_part_of_the_identity_of_a_sweep():
    def family(*overrides):
        cfg = composed(*overrides)
        return family_of(cfg, ["model.n_heads"], read_tune(cfg))

    commands = [[], ["+tune=lr"], *(["+tune=lr", more] for more in CHANGES)]
    assert len({family(*command) for command in commands}) == len(commands) == 5
    assert family("+tune=lr", "tune.seeds=[1000]") == family("+tune=lr", "tune.extend=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.muon_lr=0.01,0.02"], "optim.muon_lr is swept, but +tune=lr chooses the learning rate of each variant"),
        (["optim.lr_scale=0.5,1"], "optim.lr_scale is swept, but +tune=lr chooses the learning rate"),
        (
            ["optim.lr_scale=0.5"],
            "optim.lr_scale=0.5 has no effect with +tune=lr, which chooses it; leave it out, or set",
        ),
        (["seed=0,1000"], "tune.seeds=[1000] has seed 1000 of the grid, whose runs would then choose their own"),
        (["tune.multipliers=[]"], "tune.multipliers=[] must have at least two numbers; use [0.5, 0.71, 1, 1.41, 2]"),
    ],
)
def test_commands_that_cannot_be_tuned_are_refused(overrides, message, here, training):
    done = sweep(here, *overrides, "+tune=lr")
    assert_refused(done, message)
    assert training.started == [] and not (here / "multirun").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["tune.multipliers=[1]"],
            "tune.multipliers=[1.0] must have at least two numbers; use [0.5, 0.71, 1, 1.41, 2]",
        ),
        (["tune.multipliers=[1,-1]"], "tune.multipliers.1=-1 must be greater than 0"),
        (["tune.multipliers=[1,inf]"], "tune.multipliers.1=inf must be a finite number"),
        (
            ["tune.multipliers=[2,1]"],
            "tune.multipliers=[2.0, 1.0] must rise by at least 1 % from each to the next; use",
        ),
        (["tune.multipliers=[1,1.001]"], "must rise by at least 1 % from each to the next"),
        (["tune.seeds=[]"], "tune.seeds=[] must have at least one seed and none twice; use [1000]"),
        (["tune.seeds=[3,3]"], "tune.seeds=[3, 3] must have at least one seed and none twice"),
        (["tune.seeds=[-1]"], "tune.seeds.0=-1 must be greater than or equal to 0"),
        (["tune.extend=-1"], "tune.extend=-1 must be greater than or equal to 0"),
        (["+tune.steps=3"], "there is no setting tune.steps; did you mean tune.seeds?"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(overrides, message):
    with pytest.raises(UserError) as refused:
        read_tune(composed("+tune=lr", *overrides))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_single_run_is_not_tuned(here):
    done = call(train.main, *TINY, "data.path=text.txt", "+tune=lr", cwd=here)
    assert_refused(done, "tune=lr has no effect on a single run; leave it out, or add -m")
