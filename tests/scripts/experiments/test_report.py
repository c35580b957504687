"""scripts/report.py: its files, its answer, exit status and pictures; `tune=KEY` chooses a value for each variant.

python -m pytest tests/scripts/experiments/test_report.py
"""

import itertools
import re

import numpy as np
import pandas as pd
import pytest

from tests.contract.harness import run
from tests.scripts.experiments import synthetic
from tests.scripts.experiments.synthetic import HEADS, change, finish_run, sweep_of, write_sweep
from tril.scripts.experiments.losses import losses_of
from tril.scripts.experiments.report import Report

KEYS, NASTY = ["model.n_heads", "model.mlp"], "<script>alert(1)<b>|`*_$^$ & [d](e)"
MESSAGE = "</td></script><script>alert('2')| \x1b[31m red\nand more"
ONE_SEED, TWO_SEEDS = {0: 3.0}, {0: 3.0, 1: 3.1}


def report_of(sweep, **options):
    return Report(sweep, losses_of(sweep), **options)


@pytest.mark.filterwarnings("error::UserWarning")  # of matplotlib
def test_no_text_of_a_sweep_becomes_markup_in_its_report(tmp_path):
    losses = {(4, NASTY): {0: 3.1, 1: 3.25, 2: "failed"}, (4, "relu2"): {0: 3.0, 1: 3.1, 2: "not started"}}
    folder = write_sweep(tmp_path / "multirun/day/new", losses, KEYS, baseline=(4, "relu2"))
    change(next(folder.rglob("failed.json")), message=MESSAGE)
    change(folder / "launches.jsonl", command="python train.py -m model.mlp='<b>'")
    done = run("report", "dir=latest", "baseline=mlp=relu2", "margin=0.5", cwd=tmp_path).succeeded()
    assert done.stderr == "" and "\x1b" not in done.stdout
    files = {"report.md", "results.csv", "runs.csv", "differences.png", "curves.png"}
    assert {path.name for path in folder.iterdir() if path.is_file()} == files | {"launches.jsonl"}
    text = (folder / "report.md").read_text("utf-8")
    assert "\x1b" not in text and not re.search(r"(?<!\\)<", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({(4,): {0: "unfinished"}, (1,): ONE_SEED}, "No run of the baseline n_heads=4 has finished"),
        ({(4,): TWO_SEEDS}, "There is one variant, n_heads=4: final validation loss 3.0500 ± 0.6353"),
        ({(4,): ONE_SEED, (1,): {0: 3.1}}, "fewer than two seeds are common to both: n_heads=1."),
        (
            {**dict.fromkeys([(4,), (2,)], TWO_SEEDS), (1,): {0: 1.0, 1: 1.1001}},
            "Baseline n_heads=4. Better: n_heads=1 (-2.0000 ± 0.0005). Equal within the margin: n_heads=2.",
        ),
    ],
)
def test_the_answer_names_the_baseline_and_then_the_verdicts(losses, expected, tmp_path):
    assert expected in report_of(sweep_of(tmp_path, losses), margin=0.01).answer()


@pytest.mark.parametrize(
    ("of_baseline", "of_variant", "warning"),
    [
        ({}, {}, ""),
        ({"device": "cpu"}, {"device": "cuda"}, "device"),
        ({"causality": "certified"}, {"causality": "LEAKS at 1"}, "invalid"),
        (*[{"val_windows": {"scored": 4, "of": 8}}] * 2, "trainer.limit_val_batches"),
        ({"val_windows": {"scored": 4, "of": 8}}, {"val_windows": {}, "diverged": "x"}, "trainer.limit_val_batches"),
    ],
)
def test_reasons_to_doubt_the_losses_are_warnings(of_baseline, of_variant, warning, tmp_path):
    text = report_of(sweep_of(tmp_path, summary={(4,): of_baseline, (1,): of_variant})).text({})
    assert warning in text and ("**Warning.**" in text) == bool(warning)


def test_runs_on_different_texts_are_not_compared(tmp_path):
    report = report_of(sweep_of(tmp_path, summary={(1,): {"data_fingerprint": "x"}}))  # and equal settings of the text
    assert report.comparisons == {} and "different texts" in report.answer()
    assert not any("difference" in row for row in report.result_rows())
    assert "3.0300" in report.shown() and "3.1267" in report.shown()  # each variant alone


@pytest.mark.parametrize(
    ("losses", "status"),
    [({0: 1.0, 1: 1.1001}, 0), ({0: 4.0, 1: 4.1001}, 1), ({0: 3.0, 1: 3.1}, 1), ({0: 2.5, 1: 3.5}, 3), ({0: 3.0}, 3)],
)
def test_the_exit_status_judges_a_candidate(losses, status, tmp_path, drawn):
    folder = write_sweep(tmp_path / "sweep", {(4,): TWO_SEEDS, (1,): losses})
    assert run("report", f"dir={folder}", "candidate=n_heads=1", "margin=0.01", cwd=tmp_path).returncode == status
    run("report", f"dir={folder}", "candidate=n_heads=4", cwd=tmp_path).refused("candidate=n_heads=4")


def test_an_undecided_row_says_how_many_seeds_would_decide(tmp_path):
    report = report_of(sweep_of(tmp_path, {(4,): {0: 3.0, 1: 3.1, 2: 3.2}, (1,): {0: 3.1, 1: 3.1, 2: 3.3}}))
    [each] = report.comparisons.values()
    expected = [each.seeds_needed(effect, 0.005) for effect in (each.difference.mean, 0.01)]  # of the second launch
    assert report.seeds_needed(each) == tuple(map(str, expected)) and expected[0] < expected[1]
    assert f"{np.corrcoef([0, 1, 2], [0, 0, 2])[0, 1]:.2f}" in report.basis()


@pytest.mark.parametrize(("parameters", "paired"), [(1000, True), (1001, False)])
def test_seeds_are_paired_if_the_variants_have_equal_numbers_of_parameters(parameters, paired, tmp_path):
    assert losses_of(sweep_of(tmp_path, summary={(1,): {"parameters": parameters}})).paired is paired


@pytest.mark.filterwarnings("error")
def test_pictures_have_the_differences_and_the_curves(tmp_path, drawn):
    report = report_of(sweep_of(tmp_path))
    report.write(tmp_path)
    [each] = report.comparisons.values()
    [bar] = drawn["differences.png"].axes[0].containers
    ends = [[x, 0] for x in (each.difference.low, each.difference.high)]
    assert bar.lines[0].get_xdata() == each.difference.mean
    assert bar.lines[2][0].get_segments()[0] == pytest.approx(np.array(ends))
    lines = [line.get_xydata().tolist() for line in drawn["curves.png"].axes[0].lines]
    assert lines[0] == [[1600, 4.1], [3200, 3.1 + 0.3], [4800, 3.1 - 0.01], [6400, 3.1]]
    assert [line[-1] for line in lines] == [[6400, loss] for seeds in HEADS.values() for loss in seeds.values()]


@pytest.mark.parametrize("scale", [1, 7, 128])
def test_labels_of_the_curves_do_not_touch(scale, tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(synthetic, "TOKENS", 64 * scale)
    losses = {(4, "x" * 90): TWO_SEEDS, (4, "y z " * 30): TWO_SEEDS}
    report_of(sweep_of(tmp_path, losses, keys=KEYS, baseline=(4, ""))).write(tmp_path)
    figure = drawn["curves.png"]
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [each.get_window_extent() for each in axes.get_xticklabels() if each.get_text()]
        assert all(left.x1 + 4 < right.x0 for left, right in itertools.pairwise(boxes))
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


def test_pictures_without_data_are_not_written(tmp_path):
    sweep = sweep_of(tmp_path, {(4,): ONE_SEED})
    (sweep.runs[0].folder / "csv/version_0/metrics.csv").write_text("step,train/tokens,val/loss\n8,512,3.0\n")
    assert report_of(sweep).write(tmp_path) == ["report.md", "results.csv", "runs.csv"]


# --- tune=KEY: which value each variant gets, and on which documents the variants are compared

# Heads and multiplier of the rate -> seed -> loss of the documents 0, 4 and 8, which choose, and of the other nine
TUNED = {
    (4, 1): {0: (3.0, 1.0), 1: (3.2, 1.0)},
    (4, 2): {0: (3.1, 3.0), 1: (3.0, 3.1)},  # 3.05, less than 3.1
    (4, 4): {0: (3.3, 1.0), 1: (3.3, 1.0)},
    (1, 1): {0: (2.9, 3.5), 1: (3.4, 3.7)},  # of seed 0, which all values have: 2.9
    (1, 2): {0: (3.0, 1.0), 1: "failed"},
    (1, 4): {0: "diverged", 1: (9.0, 1.0)},
}
SIZES = np.arange(100, 220, 10)  # targets of 12 documents


@pytest.fixture
def tuned(tmp_path):
    keys = ["model.n_heads", "optim.lr_scale"]
    ended = {
        values: {seed: "failed" if x == "failed" else 3.0 for seed, x in of.items()} for values, of in TUNED.items()
    }
    write_sweep(tmp_path / "sweep", ended, keys, baseline=(4, 1))
    for (heads, scale), seeds in TUNED.items():
        for seed, losses in seeds.items():
            run = tmp_path / f"sweep/model.n_heads={heads},optim.lr_scale={scale},seed={seed}"
            if losses == "diverged":
                finish_run(run, 3.0, final_val_loss=None, diverged="step 9 is not finite")
            elif losses != "failed":
                chosen, rest = losses
                finish_run(run, 3.0, documents=(np.where(np.arange(12) % 4 == 0, chosen, rest), SIZES))
    return tmp_path / "sweep"


def test_every_fourth_document_chooses_a_value_for_each_variant_and_the_others_compare_them(tuned, drawn):
    done = run("report", f"dir={tuned}", "tune=optim.lr_scale", cwd=tuned)
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tuned / "results.csv").set_index("variant")
    assert [*rows.index] == ["n_heads=4, lr_scale=2", "n_heads=1, lr_scale=1"] and [*rows["baseline"]] == [True, False]
    assert rows["difference"].iloc[1] == pytest.approx((3.5 - 3.0 + 3.7 - 3.1) / 2)
    assert "an end of its range for (n_heads=1, lr_scale=1);" in " ".join(done.stdout.split())
    text = (tuned / "report.md").read_text("utf-8")
    assert "(9 documents)" in text
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.partition("## Tuning")[2].splitlines()]
    assert [row for row in table if row and row[0].startswith("n_heads")] == [
        ["n_heads=4, lr_scale=2", "3.1000", "3.0500", "3.3000"],
        ["n_heads=1, lr_scale=1", "2.9000", "3.0000", "diverged"],
    ]


def test_a_choice_needs_a_swept_key_and_all_runs(tuned):
    done = run("report", f"dir={tuned}", "tune=optim.lr", cwd=tuned)
    done.refused("tune=optim.lr is not swept; choose one of: model.n_heads, optim.lr_scale")
    (tuned / "model.n_heads=1,optim.lr_scale=1,seed=0/summary.json").unlink()
    done = run("report", f"dir={tuned}", "tune=optim.lr_scale", cwd=tuned)
    done.refused("tune=optim.lr_scale chooses when all runs have ended, and 1 of 12 have not")
