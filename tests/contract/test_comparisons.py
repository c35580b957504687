"""Sweeps and what they conclude: tables, differences, intervals and verdicts, computed again from the runs' files."""

import numpy as np
import pytest
import yaml
from pandas import read_csv
from scipy.stats import t

from tests.contract.harness import BARE, RUNS_IN_COPIES, merged, run, summary
from tests.oracles import intervals

LEVEL = 0.005  # of the second launch of a sweep


def runs(folder):
    """Multiplier of the rate and seed -> folder of the run."""
    settings = {path.parent: yaml.safe_load(path.read_text("utf-8")) for path in folder.rglob("config.yaml")}
    return {(config["optim"]["lr_scale"], config["seed"]): path for path, config in settings.items()}


def ends_of(mean, half):
    return [mean, mean - half, mean + half]


@pytest.mark.slow
def test_a_referee_continues_a_grid_and_the_tables_follow_from_the_files_of_the_runs(texts, tmp_path):
    common = merged(BARE[:-1], "data=files", f"data.path={texts}", "model.n_heads=2")
    arms = f"common={' '.join(common)}", "margin=0.01", "baseline=optim.lr_scale=0.01", "candidate=optim.lr_scale=1"
    with RUNS_IN_COPIES:
        grid = run("train", "-m", *common, "seed=0", "optim.lr_scale=1,0.01", cwd=tmp_path).succeeded()
        (min(runs(tmp_path).values()) / "summary.json").unlink()  # as if the run had been killed before its end
        referee, again = (run("referee", *arms, cwd=tmp_path).succeeded() for _ in range(2))
    assert [done.stdout.count("start ") for done in (grid, referee, again)] == [2, 5, 0]
    folders = runs(tmp_path)
    assert "Better: lr_scale=1 (-" in referee.stdout and len(folders) == 6
    files = [[np.load(folders[rate, seed] / "windows_last.npz") for seed in range(3)] for rate in (0.01, 1)]
    losses, targets = np.array([[x["nll"] / x["targets"] for x in row] for row in files]), files[0][0]["targets"]
    (mean,), (half,) = (each[0] for each in intervals(losses[None], targets, LEVEL))  # windows: there are 2 documents
    sweep, out = f"dir={folders[1, 0].parent}", "out=report"
    run("report", sweep, out, "baseline=lr_scale=0.01", cwd=tmp_path).succeeded()
    rows = read_csv(tmp_path / "report/results.csv").set_index("optim.lr_scale")
    assert [*rows.loc[1, ["difference", "difference_low", "difference_high"]]] == pytest.approx(ends_of(mean, half))
    summaries = {key: summary(folder) for key, folder in folders.items()}
    for _, row in read_csv(tmp_path / "report/runs.csv").iterrows():
        values = summaries[row["optim.lr_scale"], row["seed"]]
        names = [name for name in row.dropna().index if isinstance(values.get(name), int | float)]
        assert [row[name] for name in names] == pytest.approx([values[name] for name in names], rel=1e-14)
    for rate, means in zip((0.01, 1), losses @ targets / targets.sum(), strict=True):
        row, half = rows.loc[rate], t.isf(0.025, 2) * np.std(means, ddof=1) / 3**0.5
        for name in {"final_val_loss", "final_val_bpb", "parameters"} | {*row.index} & {*names}:
            assert row[name] == pytest.approx(np.mean([summaries[rate, seed][name] for seed in range(3)])), name
        columns = row[["final_val_loss", "final_val_loss_low", "final_val_loss_high"]]
        assert [*columns] == pytest.approx(ends_of(means.mean(), half))
