"""`train.py -m` with real runs in their own processes: jobs in parallel, and tuned settings."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conftest import run_python
from tests.runs import TINY
from tril.model.runs import state_of
from tril.scripts.cli.config import CONFIGS

TRAIN = CONFIGS.parent / "train.py"
SETTINGS = [*TINY, "data.path=text.txt", "callbacks.causality=null"]  # the certificate takes as long as the runs


@pytest.fixture
def here(tmp_path):
    lines = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400))
    (tmp_path / "text.txt").write_text(lines, encoding="utf-8")
    return tmp_path


def environment(cwd: Path) -> dict[str, str]:
    return {"TRIL_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}


def sweep(cwd: Path, *overrides: str) -> subprocess.CompletedProcess:
    return run_python(TRAIN, "-m", *SETTINGS, *overrides, cwd=cwd, **environment(cwd))


def runs_of(cwd: Path) -> dict[str, Path]:
    [index] = cwd.glob("multirun/*/*/sweep.json")
    return {entry["folder"]: index.parent / entry["folder"] for entry in json.loads(index.read_text())["runs"]}


@pytest.mark.slow
def test_two_parallel_jobs_keep_apart(here):
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = sweep(here, *parallel, "callbacks.samples.max_new_tokens=8,6,4")
    assert done.returncode == 0 and "3 of 3 runs are finished" in done.stdout, done.stderr
    folders = runs_of(here)
    for name, folder in folders.items():
        log = (folder / "log.txt").read_text(encoding="utf-8")
        assert state_of(folder) == "finished" and f"folder  {folder}\n" in log
        assert not any(other in log for other in folders.keys() - {name})
        assert log.count("--- sample ") == 3 and len(list(folder.glob("csv/version_*"))) == 1


@pytest.mark.slow
def test_parallel_jobs_tune_a_setting(here):
    """Real runs: each value is tried once, every fourth block of the validation windows chooses."""
    tune = ["sweep.tune={optim.lr_scale:[0.5,1,2]}", "optim=adamw"]
    done = sweep(here, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *tune, "seed=0,1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs and 3 trials to train, about 00:" in done.stdout
    assert done.stdout.count("start   tune/") == 3 and "2 of 2 runs are finished" in done.stdout
    [first, second] = runs_of(here).values()
    losses = {}
    for scale in (0.5, 1, 2):
        arrays = np.load(first.parent / "tune" / "configuration" / f"lr_scale={scale}" / "windows_last.npz")
        assert len(arrays["document_nll"]) == 1 and len(arrays["nll"]) < 20  # so each window is a block
        losses[scale] = arrays["nll"][::4].sum() / arrays["targets"][::4].sum()
    for folder in (first, second):
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        assert settings["optim"]["lr_scale"] == min(losses, key=losses.get)
