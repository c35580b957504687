"""Sweeps and what they conclude: tables, differences, intervals and verdicts, computed again from the runs' files."""

import json
import shutil
import time

import numpy as np
import pytest
import yaml
from pandas import read_csv
from scipy.stats import t

from tests.contract.harness import BARE, merged, run, summary
from tests.oracles import SIZES, intervals

LEVELS = 0.04, 0.005  # of the first two launches of a sweep


def runs(folder, group="model", name="n_heads"):
    """Value of a setting and seed -> folder of the run."""
    settings = {path.parent: yaml.safe_load(path.read_text("utf-8")) for path in folder.rglob("config.yaml")}
    return {(config[group][name], config["seed"]): path for path, config in settings.items()}


def windows(folder, n_seeds):
    """Mean losses (2, S, N) of two and four heads in the last validation of each seed, and the targets (N,)."""
    keys = [[(heads, seed) for seed in range(n_seeds)] for heads in (2, 4)]
    files = [[np.load(runs(folder)[key] / "windows_last.npz") for key in row] for row in keys]
    return np.array([[file["nll"] / file["targets"] for file in row] for row in files]), files[0][0]["targets"]


def interval(losses, sizes, level):
    """Mean difference and half width of two variants, from their losses (2, S, G)."""
    return (float(each[0, 0]) for each in intervals(losses[None], sizes, level))


def assert_reported(folder, out, mean, half, verdict, *options):
    """Makes the report; returns results.csv with a row for each number of heads."""
    run("report", f"dir={folder}", f"out={out}", "baseline=n_heads=2", *options, cwd=out).succeeded()
    table = read_csv(out / "results.csv").set_index("model.n_heads")
    columns = table.loc[4, ["difference", "difference_low", "difference_high"]]
    assert [*columns] == pytest.approx([mean, mean - half, mean + half]) and table.verdict[4].startswith(verdict)
    assert f"{mean:+.4f} ± {half:.4f}" in (out / "report.md").read_text("utf-8")
    return table


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
    expected = interval(np.stack([first, second]), SIZES, LEVELS[0])
    assert_reported(tmp_path / "runs", tmp_path, *expected, verdict, *options)


@pytest.mark.slow
def test_the_same_command_trains_what_is_missing_and_the_tables_follow_from_the_files(texts, tmp_path):
    command = "train", "-m", *BARE, f"data.path={texts}", "model.n_heads=2,4"
    run(*command, "seed=0", cwd=tmp_path).succeeded()
    first, began, killed = windows(tmp_path, 1)[0], time.time(), runs(tmp_path)[2, 0]
    (killed / "summary.json").unlink()  # as if it had been killed before its end
    run(*command, "seed=0,1", cwd=tmp_path).succeeded()
    ends = {key: (folder / "summary.json").stat().st_mtime for key, folder in runs(tmp_path).items()}
    assert {key for key in ends if ends[key] > began} == {(2, 0), (2, 1), (4, 1)}
    losses, targets = windows(tmp_path, 2)  # 20 windows take the place of fewer than 10 documents
    assert np.array_equal(losses[:, :1], first)
    expected = interval(losses, targets, LEVELS[1])  # of a second launch
    rows = assert_reported(killed.parent, tmp_path, *expected, "not distinguishable")
    summaries = {key: summary(folder) for key, folder in runs(tmp_path).items()}
    for _, row in read_csv(tmp_path / "runs.csv").iterrows():
        values = summaries[row["model.n_heads"], row["seed"]]
        names = [name for name in row.dropna().index if isinstance(values.get(name), int | float)]
        assert [row[name] for name in names] == pytest.approx([values[name] for name in names], rel=1e-14)
    for heads, means in zip((2, 4), losses @ targets / targets.sum(), strict=True):
        row, half = rows.loc[heads], t.isf(0.025, 1) * np.std(means, ddof=1) / 2**0.5
        for name in {"final_val_loss", "final_val_bpb", "parameters"} | {*row.index} & {*names}:
            assert row[name] == pytest.approx(np.mean([summaries[heads, seed][name] for seed in range(2)])), name
        columns = row[["final_val_loss", "final_val_loss_low", "final_val_loss_high"]]
        assert [*columns] == pytest.approx([means.mean(), means.mean() - half, means.mean() + half])


@pytest.mark.slow
def test_the_referee_stops_at_a_verdict_and_does_not_train_its_runs_again(tmp_path, texts):
    common = " ".join(merged(BARE[:-1], "data=files", f"data.path={texts}"))
    for first, second, word, status in ((0.01, 1, "better", 0), (1, 0.01, "worse", 1)):
        arms = f"baseline=optim.lr_scale={first}", f"candidate=optim.lr_scale={second}"
        done = run("referee", f"common={common}", *arms, "margin=0.01", "budget=1h", cwd=tmp_path)
        assert done.returncode == status and f"lr_scale={second}: {word} by " in done.stdout, done
        assert len(runs(tmp_path, "optim", "lr_scale")) == 6 and done.stdout.count("start ") in (0, 6)
    assert "was finished before" in done.stdout and len(list(tmp_path.glob("multirun/*/*/sweep.json"))) == 1
