"""scripts/referee.py with a stand-in for training: verdicts, files, exit statuses, and what it refuses."""

import json
import math
import signal

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.trials.runs_of_arms import Trainer
from tril.model.comparison import Bound, compare
from tril.scripts import referee
from tril.scripts.experiments import run_process
from tril.scripts.experiments.run_process import locked
from tril.scripts.referee import to_seconds
from tril.scripts.trials import arms, source_tree
from tril.scripts.trials.source_tree import SourceTree

NOISE = np.random.default_rng(0).standard_normal(200) * 0.01


@pytest.fixture
def trainer(monkeypatch):
    """A function that sets the losses of the runs, by arm and seed, and returns the stand-in."""

    def with_losses(losses):
        stand_in = Trainer(losses)
        monkeypatch.setattr(run_process, "spawn", stand_in)
        return stand_in

    return with_losses


@pytest.fixture(autouse=True)
def slow_parts(monkeypatch):
    """Copies of the code and composed settings have tests of their own; a picture takes a second."""
    monkeypatch.setattr(source_tree, "copy_package", lambda root: SourceTree(root / "code", "digest", "commit"))
    monkeypatch.setattr(arms, "_checked_settings", lambda overrides: {"overrides": overrides})
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: path.write_bytes(b"picture"))


def judged(cwd, *arguments):
    return call(referee.main, "candidate=model.n_heads=2", *arguments, cwd=cwd)


def shifted(by):
    """Losses with noise, different in each arm; the candidate's are higher by `by`."""
    return lambda arm, seed: 3.0 + NOISE[seed] + (by + NOISE[-1 - seed] if arm == "candidate" else 0.0)


def record_of(cwd):
    [path] = cwd.glob("referee/comparison-*/referee.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("by", "margin", "verdict", "status"),
    [(-0.1, 0.005, "better", 0), (0.1, 0.005, "worse", 1), (0.0, 0.02, "equal", 1), (0.0, 0.001, "undecided", 3)],
)
def test_verdict_and_exit_status(by, margin, verdict, status, tmp_path, trainer):
    trained = trainer(shifted(by)).trained
    done = judged(tmp_path, f"margin={margin}", "max_seeds=20")
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(f"{verdict}: candidate - baseline = ") and done.stdout.count("\n") == 1
    record = record_of(tmp_path)
    n = len(record["pairs"])
    assert record["verdict"] == verdict and len(trained) == 2 * n
    assert n == 20 if verdict == "undecided" else n < 20
    order = ["baseline 0", "candidate 0", "candidate 1", "baseline 1", "baseline 2", "candidate 2"]
    assert trained[:6] == order

    differences = np.array([NOISE[-1 - seed] + by for seed in range(n)])
    np.testing.assert_allclose([pair["difference"] for pair in record["pairs"]], differences, atol=1e-12)
    losses = np.stack([np.zeros(n), differences])[..., None]  # all documents differ alike, so the text adds nothing
    looks = [compare(losses[:, :i], np.ones(1), margin=margin, bound=Bound.EVERY_LOOK)[0] for i in range(3, n + 1)]
    last = record["looks"][-1]
    interval = looks[-1].difference
    assert (last["low"], last["high"]) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert {look.verdict for look in looks[:-1]} <= {"not distinguishable"}


def test_report_and_arrays(tmp_path, trainer):
    trainer(shifted(-0.1))
    done = judged(tmp_path, "common=model.dim=64")
    [folder] = tmp_path.glob("referee/comparison-*")
    assert done.stdout.endswith(f" {folder.relative_to(tmp_path) / 'report.md'}\n")
    page = (folder / "report.md").read_text()
    assert "candidate: `model.dim=64 model.n_heads=2`" in page and "baseline: `model.dim=64`" in page
    assert "| 3     |" in page and "on 12 documents" in page and "![Interval after each pair](interval.png)" in page
    assert (folder / "interval.png").is_file()


def test_the_same_command_trains_nothing_again_and_a_larger_budget_adds_pairs(tmp_path, trainer):
    trained = trainer(shifted(0.0)).trained
    options = ["margin=0.001", "quiet=true"]
    first = judged(tmp_path, *options, "max_seeds=4")
    assert len(trained) == 8 and first.stderr == "" and first.returncode == 3
    assert "4 pairs of runs did not settle it. 4 pairs find a difference of " in first.stdout
    again = judged(tmp_path, *options, "max_seeds=4")
    assert len(trained) == 8 and again.stdout == first.stdout
    judged(tmp_path, *options, "max_seeds=6")
    assert trained[8:] == ["baseline 4", "candidate 4", "candidate 5", "baseline 5"]
    judged(tmp_path, *options, "max_seeds=2", "seed=1")  # another comparison with the same runs
    assert len(trained) == 12 and len(list(tmp_path.glob("referee/comparison-*/"))) == 2


def test_budget_ends_before_the_pair_that_would_exceed_it(tmp_path, trainer, monkeypatch):
    from tril.scripts.trials import pair_runs

    clock = iter(range(0, 10_000, 10))  # 10 seconds for each run
    monkeypatch.setattr(pair_runs.time, "monotonic", lambda: next(clock))
    trained = trainer(shifted(0.0)).trained
    done = judged(tmp_path, "margin=0.001", "budget=110s")
    assert len(trained) == 10 and done.returncode == 3
    assert "Another pair of about 00:00:20 would exceed the budget of 00:01:50" in done.stdout
    assert sum(pair["seconds"] for pair in record_of(tmp_path)["pairs"]) == 100
    assert judged(tmp_path, "margin=0.001", "budget=110s").stdout == done.stdout  # the time of reused runs counts
    judged(tmp_path, "margin=0.001", "budget=120s")
    assert len(trained) == 12


def test_arms_that_are_equal_are_refused(tmp_path, trainer):
    trained = trainer(shifted(0.0)).trained
    done = call(referee.main, "common=model.dim=64", cwd=tmp_path)
    assert_refused(done, "baseline and candidate have the same settings; set what the candidate changes")
    assert trained == [] and not (tmp_path / "referee").exists()


def test_diverged_runs(tmp_path, trainer):
    trainer(lambda arm, seed: math.nan if arm == "candidate" and seed == 1 else 3.0)
    done = judged(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith(
        "worse after 2 pairs of runs in 00:00:00 (The loss of the candidate with seed 1 is not"
    )
    trainer(lambda arm, seed: math.nan if arm == "baseline" else 3.0)
    assert judged(tmp_path, "out=other").returncode == 3


@pytest.mark.parametrize("quiet", ["true", "false"])
def test_a_failed_run_ends_the_referee_with_one_line(quiet, tmp_path, trainer):
    message = "error: the causality certificate fails (no future), so the losses of this model would be false"
    trainer(lambda arm, seed: (2, message) if arm == "candidate" else 3.0)
    done = judged(tmp_path, f"quiet={quiet}")
    assert done.returncode == 2 and done.stdout == ""
    expected = f"error: candidate seed=0 failed with status 2: {message.removeprefix('error: ')} (referee/runs/"
    assert done.stderr.splitlines()[-1].startswith(expected)


def test_a_run_without_certificate_ends_the_referee(tmp_path, trainer):
    trainer(shifted(-0.1)).certificate = "LEAKS, losses are false"
    assert_refused(
        judged(tmp_path, "quiet=true"),
        "baseline seed=0: its causality certificate is 'LEAKS, losses are false'; the referee compares certified runs",
    )


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM")])
def test_a_signal_keeps_the_runs_and_says_how_to_continue(signum, name, tmp_path, trainer):
    def losses(arm, seed):
        if (arm, seed) == ("candidate", 1) and len(stand_in.trained) == 3:
            signal.raise_signal(signum)
        return shifted(-0.1)(arm, seed)

    stand_in = trainer(losses)
    done = judged(tmp_path, "quiet=true")
    assert done.returncode == 128 + signum and done.stdout == ""
    assert done.stderr.startswith("stopped after 1 pair; the same command continues (referee/comparison-")
    assert judged(tmp_path).returncode == 0
    assert stand_in.trained[:5] == ["baseline 0", "candidate 0", "candidate 1", "candidate 1", "baseline 1"]


def test_two_processes_do_not_share_a_comparison(tmp_path, trainer):
    trainer(shifted(-0.1))
    judged(tmp_path)
    [folder] = tmp_path.glob("referee/comparison-*/")
    with locked(folder, "other"):
        done = judged(tmp_path, "quiet=true")
    assert_refused(done, f"another process is running this comparison ({folder.relative_to(tmp_path)}); wait for it")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("candidate=model.n_heads", "cannot read 'model.n_heads'; settings are written key=value"),
        ("budget=60", "budget=60 must be a time, such as 90s, 60m or 2h"),
        ("margin=0", "margin=0 must be greater than 0"),
        ("max_seeds=1", "max_seeds=1 must be greater than or equal to 2"),
        ("out=file/folder", "cannot write to file/folder; choose another folder with out=FOLDER"),
    ],
)
def test_wrong_input_is_one_line(argument, message, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(call(referee.main, argument, cwd=tmp_path), message)


def test_time_in_seconds():
    assert [to_seconds(text) for text in ("90s", "60m", "1.5h")] == [90, 3600, 5400]
    for text in ("60", "0s", "m", "-5m", "1d", None):
        with pytest.raises(ValueError, match=f"budget={text} must be a time"):
            to_seconds(text)
