"""`train.py -m` with real runs in parallel: each in its own process and folder, after the trials of a tuned setting."""

import json

import numpy as np
import pytest
import yaml

from tests.conftest import run_python
from tests.runs import TINY
from tril.model.runs import state_of
from tril.scripts.cli.config import CONFIGS


@pytest.mark.slow
def test_parallel_jobs_tune_a_setting_and_keep_apart(text):
    """Each value is tried once; every fourth block of the validation windows chooses."""
    settings = [*TINY, "data.path=text.txt", "callbacks.causality=null", "optim=adamw", "seed=0,1"]
    jobs = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "sweep.tune={optim.lr_scale:[0.5,1,2]}"]
    here = text.parent
    done = run_python(CONFIGS.parent / "train.py", "-m", *settings, *jobs, cwd=here, TRIL_CACHE=str(here / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs and 3 trials to train, about 00:" in done.stdout
    assert done.stdout.count("start   tune/") == 3 and "2 of 2 runs are finished" in done.stdout
    [index] = here.glob("multirun/*/*/sweep.json")
    losses = {}
    for scale in (0.5, 1, 2):
        arrays = np.load(index.parent / f"tune/configuration/lr_scale={scale}/windows_last.npz")
        assert len(arrays["document_nll"]) == 1 and len(arrays["nll"]) < 20  # so each window is a block
        losses[scale] = arrays["nll"][::4].sum() / arrays["targets"][::4].sum()
    names = [entry["folder"] for entry in json.loads(index.read_text())["runs"]]
    for name, other in zip(names, names[::-1], strict=True):
        folder, log = index.parent / name, (index.parent / name / "log.txt").read_text("utf-8")
        assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["lr_scale"] == min(losses, key=losses.get)
        assert state_of(folder) == "finished" and f"folder  {folder}\n" in log and other not in log
        assert log.count("--- sample ") == 3 and len(list(folder.glob("csv/version_*"))) == 1
