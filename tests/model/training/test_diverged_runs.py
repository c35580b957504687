"""A run that diverges or runs out of memory ends with one line and status 2, and keeps what it had."""

import json
import math

import numpy as np
import pytest
import torch

from tests.runs import TINY, in_process, rows
from tests.scripts.experiments.synthetic import sweep_of
from tril.model.training.module import TrainingModule
from tril.scripts.experiments.head_averages import finished_runs
from tril.scripts.experiments.losses import compare_sweep, losses_of
from tril.scripts.experiments.sweep import Run


def strict_json(path) -> dict:
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)


def run(tmp_path, text, *overrides):
    return in_process(*TINY, f"data.path={text}", "hydra.run.dir=run", *overrides, cwd=tmp_path)


def error_line(done) -> str:
    """The last line; before it, the preparation of the text is reported."""
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith("error: ") and "Traceback" not in done.stderr, done.stderr
    return line


def test_a_learning_rate_that_is_far_too_high_stops_the_run(tmp_path, text):
    line = error_line(run(tmp_path, text, "optim.lr=1e9", "trainer.val_check_interval=1"))
    assert "learning rates muon 0.0" in line and "decay 1e+09" in line and "lower optim.lr_scale" in line
    summary = strict_json(tmp_path / "run" / "summary.json")
    assert f"error: {summary['diverged']}" == line
    assert summary["final_val_loss"] is None and summary["final_val_bpb"] is None
    assert summary["steps"] < 8 and math.isfinite(summary["best_val_loss"])
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["global_step"] == summary["best_step"]
    assert all(value.isfinite().all() for value in best["state_dict"].values())
    assert all(math.isfinite(float(row["val/loss"])) for row in rows(tmp_path / "run") if row["val/loss"])


def test_a_failed_allocation_ends_the_run_in_one_line(tmp_path, text, monkeypatch):
    step = TrainingModule.training_step

    def training_step(self, batch, batch_idx):
        return step(self, batch, batch_idx) + (torch.empty(10**15, dtype=torch.uint8).sum() if batch_idx == 5 else 0)

    monkeypatch.setattr(TrainingModule, "training_step", training_step)
    line = error_line(run(tmp_path, text))
    assert line.startswith("error: out of memory; lower data.batch_size=4, model.context_length=32 or model.dim=32 ")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_windows_of_an_earlier_validation_are_not_those_of_a_diverged_run(tmp_path, stopped):
    """The run stopped after a validation with a good loss, whose windows are on disk."""
    text = {"final_val_loss": None, "final_val_bpb": None, "diverged": "step 60 is not finite"} if stopped else {}
    losses = {(1,): {0: 2.0, 1: 2.1}, (4,): {0: 3.0, 1: 3.1}}
    sweep = sweep_of(tmp_path, losses, summary={(1,): text})
    [folder] = (tmp_path / "sweep").glob("*n_heads=1,seed=0")
    assert (folder / "windows_last.npz").is_file() and (Run(folder, 0).windows("final") is None) == stopped
    [found] = compare_sweep(losses_of(sweep), sweep).values()
    assert found.verdict == ("diverged" if stopped else "better")
    assert np.isinf(found.difference.mean) == stopped


def test_the_heads_of_a_diverged_run_are_left_out(tmp_path):
    """It may have a checkpoint of before, or none."""
    entries = {"final_val_loss": None, "diverged": "step 60 is not finite"}
    sweep = sweep_of(tmp_path, {(1,): {0: 2.0}}, baseline=(1,), summary={(1,): entries})
    with pytest.raises(ValueError, match="has no finished run.* n_heads=1, seed 0, diverged: left out."):
        finished_runs(sweep, windows=1)
