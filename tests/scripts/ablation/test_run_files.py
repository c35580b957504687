"""The validation curve in a run's log and the summary of a run, read in every state."""

import json
import math

import numpy as np
import pytest

from tests.scripts.ablation.synthetic import TOKENS_PER_STEP, write_curve, write_run
from tril.scripts.ablation.run_files import read_curve, read_run


def test_newer_rows_of_a_resumed_run_count(tmp_path):
    write_curve(tmp_path, [(25, 5.0), (50, 4.0), (60, 3.9), (75, 3.0), (100, 2.0)], version=2)
    # resumed from about step 25, validates less often, has reached step 75
    write_curve(tmp_path, [(50, 4.5), (75, 3.5)], version=10)
    curve = read_curve(tmp_path)
    assert dict(zip(curve["step"].tolist(), curve["loss"].tolist(), strict=True)) == {
        25: 5.0,
        50: 4.5,
        75: 3.5,
        100: 2.0,
    }


def test_tokens_of_older_versions_follow_from_the_training_rows(tmp_path):
    rows = [
        "step,train/loss,train/tokens,val/bpb,val/loss",
        "10,5.0,640.0,,",
        "20,4.0,1280.0,,",
        "19,,,1.5,4.5",
        "25,,,1.4,4.2",
    ]
    write_log(tmp_path, rows)
    curve = read_curve(tmp_path)
    # Step 19 is after the 20th step; the last validation was numbered by the completed steps.
    assert curve["step"].tolist() == [19, 25] and curve["tokens"].tolist() == [
        20 * TOKENS_PER_STEP,
        25 * TOKENS_PER_STEP,
    ]
    assert np.isnan(curve["seconds"]).all() and curve["bpb"].tolist() == [1.5, 1.4]


def test_missing_columns_and_an_incomplete_last_line(tmp_path):
    write_log(tmp_path, ["step,val/loss", "10,4.0", "20,nan", "30,3."], end="")
    curve = read_curve(tmp_path)
    assert curve["step"].tolist() == [10, 20] and curve["loss"].tolist() == pytest.approx([4.0, math.nan], nan_ok=True)
    for name in ("tokens", "seconds", "bpb"):
        assert np.isnan(curve[name]).tolist() == [True, True]


def write_log(folder, lines, end="\n"):
    path = folder / "csv" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + end)


def test_null_loss_of_a_diverged_run_is_nan(tmp_path):
    folder = write_run(tmp_path / "a", 3.0, config={}, seed=0, summary={"final_val_loss": None, "mfu": None})
    summary = read_run(folder, 0).summary
    assert math.isnan(summary["final_val_loss"]) and summary["mfu"] is None and summary["best_val_loss"] == 2.99
    assert json.loads((folder / "summary.json").read_text())["final_val_loss"] is None


def test_losses_of_documents_are_read_where_they_were_kept(tmp_path):
    folder = write_run(tmp_path / "a", np.array([3.0, 4.0]), config={}, seed=0)
    assert read_run(folder, 0).last.document_nll is None and read_run(folder, 0).last.document_targets is None
    arrays = {"document_nll": np.array([50.0, 0.0, 174.0]), "document_targets": np.array([20, 0, 44])}
    with np.load(folder / "windows_best.npz") as kept:
        np.savez(folder / "windows_best.npz", **dict(kept) | arrays)
    best = read_run(folder, 0).best
    assert best.document_nll.tolist() == [50, 0, 174] and best.document_targets.tolist() == [20, 0, 44]
    assert best.nll.tolist() == pytest.approx([2.99 * 32, 3.99 * 32]) and best.context_length == 32
