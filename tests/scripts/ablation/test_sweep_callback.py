"""`train.py -m` in processes of its own: what it refuses, how it goes on, and that its cells keep out of each other's way."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import assert_refused, run_python
from tril.model.runs import state_of
from tril.scripts.common.cli import CONFIGS

TRAIN = CONFIGS.parent / "train.py"
TINY = {
    "data": "files",
    "data.path": "text.txt",
    "data.tokenizer.vocab_size": 300,
    "data.batch_size": 4,
    "model.context_length": 32,
    "model.n_layers": 2,
    "model.dim": 32,
    "model.n_heads": 2,
    "trainer.max_steps": 8,
    "trainer.val_check_interval": 4,
    "trainer.log_every_n_steps": 2,
    "trainer.accelerator": "cpu",
    "trainer.precision": "32-true",
    "optim.schedule.warmup_steps": 2,
    "callbacks.samples.max_new_tokens": 8,
}


@pytest.fixture
def here(tmp_path):
    (tmp_path / "text.txt").write_text(
        "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)), encoding="utf-8"
    )
    return tmp_path


def arguments(*more: str, **choices) -> list[str]:
    settings = TINY | {key.replace("__", "."): value for key, value in choices.items()}
    return [str(TRAIN), "-m", *(f"{key}={value}" for key, value in settings.items()), *more]


def environment(cwd: Path) -> dict[str, str]:
    return {"TRIL_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}


def sweep(cwd: Path, *more: str, **choices) -> subprocess.CompletedProcess:
    return run_python(*arguments(*more, **choices), cwd=cwd, **environment(cwd))


def cells_of(cwd: Path) -> dict[str, Path]:
    [listed] = cwd.glob("multirun/*/*/sweep.json")
    return {cell["folder"]: listed.parent / cell["folder"] for cell in json.loads(listed.read_text())["cells"]}


def curve(folder: Path) -> dict[int, str]:
    """Training loss by step, as text; where a run was resumed, the newer rows count."""
    rows = [row for file in sorted(folder.glob("csv/version_*/metrics.csv")) for row in csv.DictReader(file.open())]
    return {int(row["step"]): row["train/loss"] for row in rows if row["train/loss"]}


def test_a_grid_with_illegal_cells_is_refused_with_all_of_them_named(here):
    done = sweep(here, model__n_heads="1,3,5", model__n_kv_heads="null,2", seed="0,1")
    assert (done.returncode, done.stdout) == (2, "")
    first, *others = done.stderr.splitlines()
    assert (
        first
        == "error: 10 of 12 cells of the grid cannot be; correct them, or leave them out with sweep.skip_invalid=true"
    )
    named = {line.strip().partition(": ")[0]: line.partition(": ")[2] for line in others}
    wrong = ((1, 2), (3, "null"), (3, 2), (5, "null"), (5, 2))
    assert named.keys() == {f"model.n_heads={heads} model.n_kv_heads={groups} seed=0,1" for heads, groups in wrong}
    assert named["model.n_heads=1 model.n_kv_heads=2 seed=0,1"] == "model.n_kv_heads=2 does not divide model.n_heads=1"
    assert "model.n_heads=3 does not divide model.dim=32" in named["model.n_heads=3 model.n_kv_heads=null seed=0,1"]
    assert not (here / "multirun").exists() and not (here / "cache").exists()


def test_cells_that_are_the_same_run_and_cells_whose_text_is_too_short_are_refused(here):
    twins = sweep(here, model__n_heads=2, model__n_kv_heads="null,2,1")
    assert (
        twins.returncode == 2
        and "model.n_kv_heads=2: the same run as model.n_kv_heads=null: what differs has no effect" in twins.stderr
    )
    short = sweep(here, model__context_length="32,100000")
    assert short.returncode == 2 and "model.context_length=100000: the training part has" in short.stderr
    assert not (here / "multirun").exists()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"model__n_head": "1,2"}, "there is no setting model.n_head; did you mean model.n_heads?"),
        (
            {"resume": "latest", "seed": "0,1"},
            "resume goes on with a single run; a sweep goes on when the same command is started again",
        ),
        ({"sweep__skip_invalid": "maybe"}, "sweep.skip_invalid=maybe must be true or false"),
    ],
    ids=["key", "resume", "skip_invalid"],
)
def test_what_is_wrong_with_the_whole_command(choices, message, here):
    done = sweep(here, **choices)
    assert done.returncode == 2 and message in done.stderr and not (here / "multirun").exists()


def test_a_sweep_leaves_out_what_it_is_told_to_goes_on_with_more_seeds_and_lists_all(here):
    first = sweep(here, "sweep.skip_invalid=true", model__n_heads="2,3")
    assert first.returncode == 0, first.stderr
    assert "1 of 2 cells are left out:\n  model.n_heads=3: model.n_heads=3 does not divide" in first.stdout
    assert "1 of 1 cells are finished" in first.stdout


def test_a_killed_sweep_goes_on_to_the_same_results_to_the_bit(here):
    """Killed within a cell, with dropout, between two logged steps: weights, curves and losses are those of a sweep that ran through."""
    choices = {
        "model__n_heads": "1,2",
        "model__resid_dropout": 0.1,
        "trainer__max_steps": 300,
        "trainer__val_check_interval": 101,
    }
    (here / "whole").mkdir()
    whole = sweep(here / "whole", **choices, data__path=here / "text.txt")
    assert whole.returncode == 0, whole.stderr

    (here / "killed").mkdir()
    command = [sys.executable, *arguments(**choices, data__path=here / "text.txt")]
    with subprocess.Popen(
        command, cwd=here / "killed", env=os.environ | environment(here / "killed"), start_new_session=True
    ) as process:
        while not list((here / "killed").glob("multirun/*/*/*1,seed=0/checkpoints/last.ckpt")):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    [interrupted, untouched] = cells_of(here / "killed").values()
    assert (state_of(interrupted), state_of(untouched)) == ("unfinished", "not started")

    again = sweep(here / "killed", **choices, data__path=here / "text.txt")
    assert again.returncode == 0 and "2 of 2 cells are finished" in again.stdout, again.stdout + again.stderr
    for name, folder in cells_of(here / "whole").items():
        other = cells_of(here / "killed")[name]
        for part in ("last", "best"):
            mine, its = np.load(folder / f"windows_{part}.npz"), np.load(other / f"windows_{part}.npz")
            assert all(np.array_equal(mine[key], its[key]) for key in ("step", "nll", "targets"))
        mine, its = (
            torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (folder, other)
        )
        assert all(torch.equal(mine[key], its[key]) for key in mine)
        assert curve(folder) == curve(other) and len(curve(folder)) == 150
    assert len(list(interrupted.glob("csv/version_*"))) == 2  # it was resumed, not begun anew

    finished = {folder: (folder / "summary.json").stat().st_mtime_ns for folder in cells_of(here / "killed").values()}
    third = sweep(here / "killed", **choices, data__path=here / "text.txt")
    assert third.returncode == 0 and "0 of 2 cells to run" in third.stdout
    assert finished == {folder: (folder / "summary.json").stat().st_mtime_ns for folder in finished}


def test_two_jobs_at_once_keep_apart_and_a_failed_cell_does_not_end_the_others(here):
    """A sample of no tokens is refused by its run alone, which has the model and the tokenizer to look at it with."""
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = sweep(here, *parallel, callbacks__samples__max_new_tokens="8,0,4")
    assert done.returncode == 1
    assert (
        "FAILED  callbacks.samples.max_new_tokens=0,seed=0: error: callbacks.samples: max_new_tokens=0 must be a whole number"
        in done.stdout
    )
    assert "2 of 3 cells are finished" in done.stdout
    assert (
        "NOT finished: callbacks.samples.max_new_tokens=0,seed=0 (failed); the same command tries again" in done.stdout
    )
    folders = cells_of(here)
    assert [state_of(folder) for folder in folders.values()] == ["finished", "failed", "finished"]
    for name, folder in folders.items():
        log = (folder / "log.txt").read_text(encoding="utf-8")
        assert f"folder  {folder}\n" in log and not any(other in log for other in folders.keys() - {name})
        assert log.count("--- sample at step") == (0 if "=0," in name else 2)
        assert len(list(folder.glob("csv/version_*"))) == 1


def test_a_grid_for_other_machines_is_checked_but_neither_prepared_nor_timed(here):
    """As for a cluster; here Hydra's own launcher is taken for one."""
    code = "import tril.train; from tril.scripts.ablation import sweep_callback; sweep_callback.HERE = (); tril.train.main()"
    choices = {
        "trainer__accelerator": "cuda",
        "seed": "0,1",
        "model__n_heads": "2,3",
    }  # this machine may have no GPU: its jobs will tell
    refused = run_python("-c", code, *arguments(**choices)[1:], cwd=here, **environment(here))
    assert (
        refused.returncode == 2
        and "2 of 4 cells" in refused.stderr
        and "model.n_heads=3 seed=0,1: model.n_heads=3" in refused.stderr
    )

    done = run_python("-c", code, *arguments(seed="0,1")[1:], cwd=here, **environment(here))
    assert done.returncode == 0, done.stdout + done.stderr
    listed = done.stdout.partition("start ")[0]
    assert (
        "the configuration    0,1           ?                ?             ?" in listed
        and "2 of 2 cells to run\n" in listed
    )
    assert "2 of 2 cells are finished" in done.stdout and "of computing" not in done.stdout


def test_a_single_run_knows_nothing_of_sweeps(here):
    assert_refused(run_python(TRAIN, "sweep.skipinvalid=true", cwd=here), "there is no setting sweep.skipinvalid")
    assert_refused(
        run_python(TRAIN, "+ablation=heads", cwd=here),
        "the ablation is a grid over model.n_heads; run it with python train.py -m",
    )
