"""scripts/referee.py with a stand-in for training: verdicts, files, exit statuses, and what it refuses."""

import json
import math
import re
import signal

import numpy as np
import pytest

from tests.contract.harness import run
from tests.runs import TINY
from tril.model.comparison import DIVERGED, UNCLEAR, Bound, Comparison, compare
from tril.model.intervals import Interval
from tril.scripts.experiments.referee import Rules, conclude
from tril.scripts.experiments.report import read_report

NOISE = np.random.default_rng(0).standard_normal(200) * 0.01
ARMS = ("baseline", "candidate")
COMMON = "common=" + " ".join(TINY[1:])  # on the default text


def shifted(by):
    """Losses with noise, different in each arm; the candidate's are higher by `by`."""
    return lambda arm, seed: 3.0 + NOISE[seed] + (by + NOISE[-1 - seed] if arm == "candidate" else 0.0)


@pytest.fixture
def trainer(processes, monkeypatch):
    """A function: sets the loss of an arm and a seed, or a status and a line; returns the runs that were started.

    A pair is estimated to take 20 seconds, and takes them.
    """

    def estimate(runs):
        for each in runs:
            each.sizes["estimated_seconds"] = 10.0
        return list(runs), []

    def with_losses(loss_of, candidate_bytes=3.0):
        started = []

        def outcome(settings):
            arm, seed = ARMS[settings.get("model.n_heads") == "1"], int(settings["seed"])
            started.append(f"{arm} {seed}")
            loss, n_bytes = loss_of(arm, seed), candidate_bytes if arm == "candidate" else 3.0
            return loss if isinstance(loss, tuple) else {"loss": loss, "seconds": 10.0, "val_bytes_per_token": n_bytes}

        processes(outcome)
        return started

    monkeypatch.setattr("tril.scripts.experiments.grid.estimate_runs", estimate)
    monkeypatch.setattr("tril.scripts.experiments.report.draw", lambda *_: {})  # takes seconds
    return with_losses


def judged(cwd, *arguments, candidate="model.n_heads=1"):
    return run("referee", f"candidate={candidate}", COMMON, "quiet=true", *arguments, cwd=cwd)


def figures(done):
    return [float(number) for number in re.findall(r"[+-]\d\.\d{4}", done.stdout)]


@pytest.mark.parametrize(
    ("by", "margin", "verdict", "status"),
    [(-0.1, 0.005, "better", 0), (0.1, 0.005, "worse", 1), (0.0, 0.03, "equal", 1), (0.0, 0.001, "undecided", 3)],
)
def test_it_ends_at_the_first_look_with_a_verdict(by, margin, verdict, status, tmp_path, trainer):
    started = trainer(shifted(by))
    done = judged(tmp_path, f"margin={margin}", "max_seeds=6")
    assert done.returncode == status and done.stderr == "", done.stderr
    assert done.stdout.startswith(f"{verdict}: candidate - baseline = ") and done.stdout.count("\n") == 1
    n = len(started) // 2
    assert n == 6 if verdict == "undecided" else n < 6
    assert started[:5] == ["baseline 0", "candidate 0", "candidate 1", "baseline 1", "baseline 2"]
    losses = np.array([[shifted(by)(arm, seed) for seed in range(n)] for arm in ARMS])[..., None]
    # all windows of a pair differ alike, so the text adds nothing
    looks = [compare(losses[:, :i], np.ones(1), margin=margin, bound=Bound.EVERY_LOOK)[0] for i in range(3, n + 1)]
    assert {look.verdict for look in looks[:-1]} <= {UNCLEAR}
    last = looks[-1].difference
    assert figures(done) == pytest.approx([last.mean, last.low, last.high], abs=6e-5)

    [folder] = tmp_path.glob("multirun/*/*")  # that of a sweep, with a report
    assert done.stdout.endswith(f" {folder.relative_to(tmp_path) / 'report.md'}\n")
    page = (folder / "report.md").read_text()
    assert page.startswith("# Referee over model.n_heads\n") and f"± {margin:g} nats per token" in page
    [each] = read_report(folder).comparisons.values()
    assert figures(done) == pytest.approx([each.difference.mean, each.difference.low, each.difference.high], abs=6e-5)
    [launch] = json.loads((folder / "sweep.json").read_text())["launches"]
    assert launch["seeds"] == list(range(n)) and launch["command"].startswith("python scripts/referee.py ")


def test_commands_share_runs_and_a_budget_ends_before_the_pair_that_exceeds_it(tmp_path, trainer):
    started, margin = trainer(shifted(0.0)), "margin=0.001"
    message = "budget=59s is too small: a pair of runs takes about 00:00:20, and a verdict needs at least 3 pairs"
    judged(tmp_path, "budget=59s").refused(message)
    assert started == [] and not list(tmp_path.iterdir())
    done = judged(tmp_path, margin, "budget=70s")
    assert len(started) == 6 and done.returncode == 3
    assert "Another pair, about 00:00:20, would exceed the budget of 00:01:10." in done.stdout
    judged(tmp_path, margin, "budget=80s")  # the time of finished runs counts
    first = judged(tmp_path, margin, "max_seeds=4")
    assert len(started) == 8 and "4 pairs of runs did not settle it. 4 pairs find a difference of " in first.stdout
    swapped = judged(tmp_path, "baseline=model.n_heads=1", margin, "max_seeds=4", candidate="model.n_heads=2")
    assert figures(swapped)[0] == -figures(first)[0] and len(started) == 8
    judged(tmp_path, margin, "max_seeds=3", candidate="model.n_heads=4")  # the baseline is trained already
    assert len(started) == 11 and len(list(tmp_path.glob("multirun/*/*/sweep.json"))) == 1
    judged(tmp_path, margin, "max_seeds=3", "seed=1")  # another comparison
    assert len(started) == 17 and len(list(tmp_path.glob("multirun/*/*/sweep.json"))) == 2


def test_a_look_ends_the_comparison_or_not():
    for n, compared, mean, seconds, expected in (
        (
            1,
            UNCLEAR,
            -0.1,
            700,
            ("undecided", "The 2 pairs that are still needed for a verdict, about 00:23:20, would"),
        ),
        (5, DIVERGED, math.inf, 60, ("worse", "A loss of the candidate is not finite.")),
        (5, DIVERGED, math.nan, 60, ("undecided", "A loss of the baseline is not finite.")),
        (100, UNCLEAR, -0.1, 60, ("undecided", "100 pairs of runs did not settle it; the error rate holds for 100")),
    ):
        look = Comparison(Interval(mean, -0.6, 0.4, n), compared, n, 0.1, 5.0)
        verdict, reason = conclude(look, seconds, Rules(margin=0.01, seconds=2000.0))
        assert verdict == expected[0] and reason.startswith(expected[1])


def test_a_failed_run_and_different_texts_end_the_referee_with_one_line_and_a_signal_keeps_the_runs(tmp_path, trainer):
    message = "error: the causality certificate fails (no future), so the losses of this model would be false"
    trainer(lambda arm, seed: (2, message) if arm == "candidate" else 3.0)
    judged(tmp_path).refused(f"candidate seed=0 failed with status 2: {message[7:]} (multirun/")
    trainer(shifted(0.0), candidate_bytes=6.0)
    sizes = "the validation texts of the arms differ (768 and 1,536 bytes)"
    judged(tmp_path, "out=other").refused(sizes)

    def losses(arm, seed):
        if len(started) == 3:
            signal.raise_signal(signal.SIGTERM)
        return shifted(-0.1)(arm, seed)

    started = trainer(losses)
    done = judged(tmp_path, "out=stopped")
    assert done.returncode == 128 + signal.SIGTERM and done.stdout == ""
    assert done.stderr == "stopped after 1 pair; the same command continues (stopped)\n"
    assert judged(tmp_path, "out=stopped").returncode == 0
    assert started[:5] == ["baseline 0", "candidate 0", "candidate 1", "candidate 1", "baseline 1"]
