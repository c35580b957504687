"""`report.py tune=KEY`: which value each variant gets, and on which documents the variants are compared."""

import numpy as np
import pandas as pd
import pytest

from tests.contract.harness import run
from tests.scripts.experiments.synthetic import finish_run, write_sweep

# Heads and multiplier of the rate -> seed -> loss of the documents 0, 4 and 8, which choose, and of the other nine
RUNS = {
    (4, 1): {0: (3.0, 1.0), 1: (3.2, 1.0)},
    (4, 2): {0: (3.1, 3.0), 1: (3.0, 3.1)},  # 3.05, less than 3.1
    (4, 4): {0: (3.3, 1.0), 1: (3.3, 1.0)},
    (1, 1): {0: (2.9, 3.5), 1: (3.4, 3.7)},  # of seed 0, which all values have: 2.9
    (1, 2): {0: (3.0, 1.0), 1: "failed"},
    (1, 4): {0: "diverged", 1: (9.0, 1.0)},
}
SIZES = np.arange(100, 220, 10)  # targets of 12 documents


@pytest.fixture
def folder(tmp_path):
    keys = ["model.n_heads", "optim.lr_scale"]
    ended = {
        values: {seed: "failed" if x == "failed" else 3.0 for seed, x in of.items()} for values, of in RUNS.items()
    }
    write_sweep(tmp_path / "sweep", ended, keys, baseline=(4, 1))
    for (heads, scale), seeds in RUNS.items():
        for seed, losses in seeds.items():
            run = tmp_path / f"sweep/model.n_heads={heads},optim.lr_scale={scale},seed={seed}"
            if losses == "diverged":
                finish_run(run, 3.0, final_val_loss=None, diverged="step 9 is not finite")
            elif losses != "failed":
                chosen, rest = losses
                finish_run(run, 3.0, documents=(np.where(np.arange(12) % 4 == 0, chosen, rest), SIZES))
    return tmp_path / "sweep"


def test_every_fourth_document_chooses_a_value_for_each_variant_and_the_others_compare_them(folder, drawn):
    done = run("report", f"dir={folder}", "tune=optim.lr_scale", cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(folder / "results.csv").set_index("variant")
    assert [*rows.index] == ["n_heads=4, lr_scale=2", "n_heads=1, lr_scale=1"] and [*rows["baseline"]] == [True, False]
    assert rows["difference"].iloc[1] == pytest.approx((3.5 - 3.0 + 3.7 - 3.1) / 2)
    assert "an end of its range for (n_heads=1, lr_scale=1);" in " ".join(done.stdout.split())
    text = (folder / "report.md").read_text("utf-8")
    assert "(9 documents)" in text
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.partition("## Tuning")[2].splitlines()]
    assert [row for row in table if row and row[0].startswith("n_heads")] == [
        ["n_heads=4, lr_scale=2", "3.1000", "3.0500", "3.3000"],
        ["n_heads=1, lr_scale=1", "2.9000", "3.0000", "diverged"],
    ]


def test_a_choice_needs_a_swept_key_and_all_runs(folder):
    done = run("report", f"dir={folder}", "tune=optim.lr", cwd=folder)
    done.refused("tune=optim.lr is not swept; choose one of: model.n_heads, optim.lr_scale")
    (folder / "model.n_heads=1,optim.lr_scale=1,seed=0/summary.json").unlink()
    done = run("report", f"dir={folder}", "tune=optim.lr_scale", cwd=folder)
    done.refused("tune=optim.lr_scale chooses when all runs have ended, and 1 of 12 have not")
