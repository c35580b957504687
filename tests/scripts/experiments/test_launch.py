"""`train.py -m` around its runs: what it refuses, lists and writes. The runs themselves are not trained here."""

import re

import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.experiments.commands import index_of, sweep
from tril import train
from tril.scripts.cli.errors import UserError
from tril.scripts.experiments import grid, launch


def test_grid_with_invalid_runs_is_refused_with_all_of_them_named(here):
    done = sweep(here, "model.n_heads=1,3,5", "model.n_kv_heads=null,2", "seed=0,1")
    assert (done.returncode, done.stdout) == (2, "")
    first, *others = done.stderr.splitlines()
    assert first == (
        "error: 10 of 12 runs of the grid are invalid; correct them, or leave them out with sweep.skip_invalid=true"
    )
    named = {line.strip().partition(": ")[0]: line.partition(": ")[2] for line in others}
    wrong = ((1, 2), (3, "null"), (3, 2), (5, "null"), (5, 2))
    assert named.keys() == {f"model.n_heads={heads} model.n_kv_heads={groups} seed=0,1" for heads, groups in wrong}
    assert "model.n_kv_heads=2 must divide model.n_heads=1" in named["model.n_heads=1 model.n_kv_heads=2 seed=0,1"]
    assert "model.n_heads=3 must divide model.dim=32" in named["model.n_heads=3 model.n_kv_heads=null seed=0,1"]
    assert not (here / "multirun").exists() and not list(here.rglob("tokens.bin"))


def test_equal_runs_are_refused(here):
    done = sweep(here, "model.n_heads=2", "model.n_kv_heads=null,2,1")
    assert done.returncode == 2
    assert "model.n_kv_heads=2: the same run as model.n_kv_heads=null: the difference has no effect" in done.stderr
    done = sweep(here, "optim=adamw", "optim.ns_steps=5,4")
    assert done.returncode == 2
    assert "optim.ns_steps=4: the same run as optim.ns_steps=5: the difference has no effect" in done.stderr
    assert not (here / "multirun").exists()


def test_the_grid_of_positions_lists_alibi(here, no_timing):
    done = sweep(here, "+ablation=positions", "trainer.max_steps=8", "trainer.val_check_interval=4", "seed=0")
    assert done.returncode == 0, done.stderr
    listed = [re.split(r"\s{2,}", line.strip())[:2] for line in done.stdout.splitlines()[1:5]]
    assert listed == [[f"model.pos={pos}", "0"] for pos in ("rope", "learned", "alibi", "none")]
    assert index_of(here)["baseline"] == {"model.pos": "rope"}


def test_values_of_earlier_versions_are_the_same_run(here):
    done = sweep(here, "model.qk_norm=true,false,rmsnorm,layernorm,foo")
    assert done.returncode == 2 and "2 of 5 runs of the grid are invalid" in done.stderr
    assert "model.qk_norm=rmsnorm: the same run as model.qk_norm=True: the difference has no effect" in done.stderr
    assert "model.qk_norm=foo: model.qk_norm=foo must be 'rmsnorm', 'layernorm' or 'none'" in done.stderr


def test_muons_keys_make_different_runs(here, no_timing):
    assert sweep(here, "optim=muon", "optim.ns_steps=5,4").returncode == 0


def test_runs_for_which_the_text_is_too_short_are_refused(here, no_timing):
    short = sweep(here, "model.context_length=32,100000")
    assert short.returncode == 2 and "model.context_length=100000: the training part has" in short.stderr
    assert not (here / "multirun").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_head=1,2"], "there is no setting model.n_head; did you mean model.n_heads?"),
        (
            ["resume=latest", "seed=0,1"],
            "resume=latest continues a single run; to continue a sweep, start the same command again",
        ),
        (["sweep.skip_invalid=maybe"], "sweep.skip_invalid=maybe must be true or false"),
        (["seed=0,1", "model.dim=(8"], "cannot read 'model.dim=(8'"),
    ],
    ids=["key", "resume", "skip_invalid", "grammar"],
)
def test_wrong_commands_are_refused(overrides, message, here):
    done = sweep(here, *overrides)
    assert done.returncode == 2 and message in done.stderr and not (here / "multirun").exists()


def test_invalid_runs_are_left_out_on_request(here, no_timing):
    done = sweep(here, "sweep.skip_invalid=true", "model.n_heads=2,3")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are left out:\n  model.n_heads=3: model.n_heads=3 must divide" in done.stdout
    assert "1 of 1 runs are finished; python scripts/report.py dir=multirun" in done.stdout


def test_a_sweep_lists_its_runs_and_more_seeds_find_its_folder(here, no_timing):
    first = sweep(here, "model.n_heads=1,2", "seed=0,1")
    assert first.returncode == 0, first.stderr
    header, *rows = (re.split(r"\s{2,}", line.strip()) for line in first.stdout.splitlines()[:3])
    assert header == ["seeds", "parameters", "MFLOP per token", "time of a run", "so far"]
    assert [row[:2] for row in rows] == [["model.n_heads=1", "0,1"], ["model.n_heads=2", "0,1"]]
    assert [row[4] for row in rows] == ["00:01:40", "00:01:40"]
    assert "4 of 4 runs to train, about 00:06:40 of computing, estimated from a few steps of each" in first.stdout
    index = index_of(here)
    assert index["swept"] == ["model.n_heads"] and index["baseline"] == {"model.n_heads": 2}
    names = [f"model.n_heads={heads},seed={seed}" for heads in (1, 2) for seed in (0, 1)]
    assert [entry["folder"] for entry in index["runs"]] == names
    assert index["runs"][0]["values"] == {"model.n_heads": 1} and index["runs"][0]["estimated_seconds"] == 100.0
    assert {"model.n_heads=1", "seed=0"} <= set(index["runs"][0]["overrides"])

    assert [stage["seeds"] for stage in index["launches"]] == [[0, 1]]
    command = index["launches"][0]["command"]
    assert command.endswith(" model.n_heads=1,2 seed=0,1") and " -m data=files " in command

    again = sweep(here, "model.n_heads=1,2", "seed=1,2")
    assert again.returncode == 0 and "2 of 4 runs to train" in again.stdout
    assert "start   model.n_heads=2,seed=2\n" in again.stdout and "start   model.n_heads=2,seed=1" not in again.stdout
    assert "6 of 6 runs are finished" in again.stdout
    assert {entry["folder"] for entry in index_of(here)["runs"]} == {
        f"model.n_heads={heads},seed={seed}" for heads in (1, 2) for seed in (0, 1, 2)
    }
    assert "0 of 4 runs to train\n" in sweep(here, "model.n_heads=1,2", "seed=0,1").stdout
    assert [stage["seeds"] for stage in index_of(here)["launches"]] == [[0, 1], [2]]
    new = sweep(here, "model.n_heads=1,2", "seed=0,1", "sweep.new=true")
    assert "4 of 4 runs to train" in new.stdout and len(list(here.glob("multirun/*/*/sweep.json"))) == 2


def test_folder_of_another_sweep_is_refused(here, no_timing):
    assert sweep(here, "seed=0,1", "hydra.sweep.dir=mine").returncode == 0
    assert (here / "mine" / "seed=1" / "summary.json").is_file()
    done = sweep(here, "seed=0,1", "model.dim=64", "hydra.sweep.dir=mine")
    assert done.returncode == 2 and "hydra.sweep.dir=mine holds a sweep of other keys or settings" in done.stderr
    (here / "mine" / "sweep.json").write_text("{}")
    done = sweep(here, "seed=0,1", "hydra.sweep.dir=mine")
    assert done.returncode == 2 and "sweep.json is not a list of runs" in done.stderr


def test_a_failed_run_does_not_end_the_others_and_is_trained_again(here, no_timing):
    done = sweep(here, "optim.lr_scale=1,1e30,0.5")
    assert done.returncode == 1
    message = "error: the loss is nan"
    assert f"FAILED  optim.lr_scale=1e+30,seed=0: {message} (status 2" in done.stdout
    assert "2 of 3 runs are finished" in done.stdout
    assert "NOT finished: optim.lr_scale=1e+30,seed=0 (failed); start the same command again to continue" in done.stdout
    again = sweep(here, "optim.lr_scale=1,1e30,0.5")
    assert "1 of 3 runs to train" in again.stdout and again.stdout.count("start   ") == 1


def test_grid_for_other_machines_is_checked_but_neither_prepared_nor_timed(here, monkeypatch):
    """As on a cluster; Hydra's own launcher stands in for Slurm's."""
    monkeypatch.setattr(launch, "LOCAL_LAUNCHERS", ())
    # this machine may have no GPU
    refused = sweep(here, "trainer.accelerator=cuda", "seed=0,1", "model.n_heads=2,3")
    assert refused.returncode == 2 and "2 of 4 runs" in refused.stderr
    assert "model.n_heads=3 seed=0,1: model.n_heads=3" in refused.stderr

    done = sweep(here, "seed=0,1")
    assert done.returncode == 0, done.stdout + done.stderr
    listed = done.stdout.partition("start ")[0]
    assert "the configuration    0,1           ?                ?              ?" in listed
    assert "2 of 2 runs to train\n" in listed and not list(here.rglob("tokens.bin"))
    assert "2 of 2 runs are finished" in done.stdout and "of computing" not in done.stdout


def test_ablation_without_a_grid_is_refused(here):
    done = call(train.main, "+ablation=heads", cwd=here)
    assert_refused(done, "the ablation is a grid over model.n_heads; run it with python train.py -m")


def test_folder_names_are_short_and_unique():
    assert grid.folder_name({"a.b": 1, "seed": 0}) == "a.b=1,seed=0"
    long = [grid.folder_name({"a": "x" * 300 + end}) for end in "yz"]
    assert len(set(long)) == 2 and all(len(name) < 130 for name in long)
    assert grid.folder_name({"a": "x/y"}).startswith("a=x_y-")


def test_grid_without_a_valid_run_is_refused_even_on_request():
    rejected = [grid.Rejected(["a.b=1", f"seed={seed}"], "too large") for seed in (0, 1)]
    with pytest.raises(UserError, match="2 of 2 runs of the grid are invalid; correct them\n   seed=0,1: too large"):
        grid.report_rejected([], rejected, skip_invalid=True)
