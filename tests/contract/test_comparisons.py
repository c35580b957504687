"""Sweeps and what they conclude: tables, differences, intervals and verdicts, computed again from the runs' files."""

import json
import shutil

import numpy as np
import pytest
import yaml
from pandas import read_csv
from scipy.stats import t

from tests.contract.harness import BARE, RUNS_IN_COPIES, merged, run, summary
from tests.oracles import SIZES, intervals

LEVELS = 0.04, 0.005  # of the first two launches of a sweep


def runs(folder, group="model", name="n_heads"):
    """Value of a setting and seed -> folder of the run."""
    settings = {path.parent: yaml.safe_load(path.read_text("utf-8")) for path in folder.rglob("config.yaml")}
    return {(config[group][name], config["seed"]): path for path, config in settings.items()}


def interval(losses, sizes, level):
    """Mean difference and half width of two variants, from their losses (2, S, G)."""
    return (float(each[0, 0]) for each in intervals(losses[None], sizes, level))


def ends_of(mean, half):
    return [mean, mean - half, mean + half]


def report(folder, out, *options):
    run("report", f"dir={folder}", f"out={out}", *options, cwd=out).succeeded()


CASES = [(3, -0.1, 0.02, "better"), (4, 0.1, 0.001, "worse"), (5, 0.03, 0.04, "not dist"), (5, 0.03, 0.04, "equal")]


@pytest.mark.parametrize(("n_seeds", "effect", "of_text", "verdict"), CASES)
def test_a_difference_is_paired_by_seed_and_document(trained, tmp_path, n_seeds, effect, of_text, verdict):
    chance = np.random.default_rng(n_seeds)
    seed, text, rest = (chance.normal(size=(2, *shape)) for shape in ((n_seeds, 1), (1, 12), (n_seeds, 12)))
    first = 3 + seed[0] + text[0]  # what seeds and documents change for both variants cancels
    second = first + effect + 0.02 * seed[1] + of_text * text[1] + 0.03 * rest[1]
    for heads, means in ((2, [*first, first[0]]), (4, second)):  # a seed of one variant only is left out
        for number, losses in enumerate(means):
            path = shutil.copytree(trained, tmp_path / "runs" / f"{heads}-{number}")
            settings = yaml.safe_load((path / "config.yaml").read_text("utf-8"))
            settings["seed"], settings["model"]["n_heads"] = number, heads
            (path / "config.yaml").write_text(json.dumps(settings), "utf-8")  # JSON is YAML
            arrays = dict(np.load(path / "windows_last.npz"))
            arrays |= {"document_nll": losses * SIZES, "document_targets": SIZES}
            np.savez(path / "windows_last.npz", **arrays)
    options = ["margin=0.5"] * (verdict == "equal")
    mean, half = interval(np.stack([first, second]), SIZES, LEVELS[0])
    report(tmp_path / "runs", tmp_path, "baseline=n_heads=2", *options)
    row = read_csv(tmp_path / "results.csv").set_index("model.n_heads").loc[4]
    assert [*row[["difference", "difference_low", "difference_high"]]] == pytest.approx(ends_of(mean, half))
    assert row.verdict.startswith(verdict)
    assert f"{mean:+.4f} ± {half:.4f}" in (tmp_path / "report.md").read_text("utf-8")


@pytest.fixture(scope="module")
def judged(once, texts):
    """A folder with the sweep of a referee, which goes on with the runs of a grid; and what both printed."""

    def make(cwd):
        common = merged(BARE[:-1], "data=files", f"data.path={texts}", "model.n_heads=2")
        grid = run("train", "-m", *common, "seed=0", "optim.lr_scale=1,0.01", cwd=cwd).succeeded()
        ended = min(runs(cwd, *RATE).values())
        (ended / "summary.json").unlink()  # as if it had been killed before its end
        arms = f"common={' '.join(common)}", "margin=0.01", "baseline=optim.lr_scale=0.01", "candidate=optim.lr_scale=1"
        referee = run("referee", *arms, cwd=cwd)
        again = run("referee", *arms, cwd=cwd)
        printed = [(done.returncode, done.stdout) for done in (grid, referee, again)]
        (cwd / "printed.json").write_text(json.dumps(printed))

    with RUNS_IN_COPIES:
        return once("judged", make)


RATE = "optim", "lr_scale"


@pytest.mark.slow
def test_a_referee_and_a_grid_train_what_is_missing_and_stop_at_a_verdict(judged):
    (_, grid), (status, referee), (again, third) = json.loads((judged / "printed.json").read_text())
    assert (grid.count("start "), referee.count("start "), third.count("start ")) == (2, 5, 0)
    assert status == again == 0 and "Better: lr_scale=1 (-" in referee and len(runs(judged, *RATE)) == 6


@pytest.mark.slow
def test_the_tables_of_a_sweep_follow_from_the_files_of_its_runs(judged, tmp_path):
    folders = runs(judged, *RATE)
    files = [[np.load(folders[rate, seed] / "windows_last.npz") for seed in range(3)] for rate in (0.01, 1)]
    losses, targets = (
        np.array([[each["nll"] / each["targets"] for each in row] for row in files]),
        files[0][0]["targets"],
    )
    level = LEVELS[1]  # 20 windows take the place of fewer than 10 documents
    expected = interval(losses, targets, level)
    report(folders[1, 0].parent, tmp_path, "baseline=lr_scale=0.01")
    rows = read_csv(tmp_path / "results.csv").set_index("optim.lr_scale")
    assert [*rows.loc[1, ["difference", "difference_low", "difference_high"]]] == pytest.approx(ends_of(*expected))
    summaries = {key: summary(folder) for key, folder in folders.items()}
    for _, row in read_csv(tmp_path / "runs.csv").iterrows():
        values = summaries[row["optim.lr_scale"], row["seed"]]
        names = [name for name in row.dropna().index if isinstance(values.get(name), int | float)]
        assert [row[name] for name in names] == pytest.approx([values[name] for name in names], rel=1e-14)
    for rate, means in zip((0.01, 1), losses @ targets / targets.sum(), strict=True):
        row, half = rows.loc[rate], t.isf(0.025, 2) * np.std(means, ddof=1) / 3**0.5
        for name in {"final_val_loss", "final_val_bpb", "parameters"} | {*row.index} & {*names}:
            assert row[name] == pytest.approx(np.mean([summaries[rate, seed][name] for seed in range(3)])), name
        columns = row[["final_val_loss", "final_val_loss_low", "final_val_loss_high"]]
        assert [*columns] == pytest.approx(ends_of(means.mean(), half))
