"""scripts/referee.py with a stand-in for training: verdicts, files, exit statuses, and what it refuses."""

import json
import math
import re
import signal

import numpy as np
import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.runs import TINY
from tril.model.comparison import DIVERGED, UNCLEAR, Bound, Comparison, compare
from tril.model.intervals import Interval
from tril.scripts import referee
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
        for run in runs:
            run.sizes["estimated_seconds"] = 10.0
        return list(runs), []

    def with_losses(loss_of, bytes_of={}):  # noqa: B006
        started = []

        def outcome(settings):
            arm, seed = ARMS[settings.get("model.n_heads") == "1"], int(settings["seed"])
            started.append(f"{arm} {seed}")
            loss = loss_of(arm, seed)
            if isinstance(loss, tuple):
                return loss
            documents = {"documents": (loss, np.full(12, 50)), "val_bytes_per_token": bytes_of.get(arm, 3.0)}
            return {"loss": loss, "seconds": 10.0, **documents}

        processes(outcome)
        return started

    monkeypatch.setattr("tril.scripts.experiments.grid.estimate_runs", estimate)
    monkeypatch.setattr("tril.scripts.experiments.report.draw", lambda *_: {})  # takes seconds
    return with_losses


def judged(cwd, *arguments, candidate="model.n_heads=1"):
    return call(referee.main, f"candidate={candidate}", COMMON, "quiet=true", *arguments, cwd=cwd)


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
    # all documents of a pair differ alike, so the text adds nothing
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


def test_the_same_command_trains_nothing_again_and_other_commands_share_its_runs(tmp_path, trainer):
    started, margin = trainer(shifted(0.0)), "margin=0.001"
    first = judged(tmp_path, margin, "max_seeds=4")
    assert len(started) == 8 and first.returncode == 3
    assert "4 pairs of runs did not settle it. 4 pairs find a difference of " in first.stdout
    assert judged(tmp_path, margin, "max_seeds=4").stdout == first.stdout and len(started) == 8
    swapped = judged(tmp_path, "baseline=model.n_heads=1", margin, "max_seeds=4", candidate="model.n_heads=2")
    assert figures(swapped)[0] == -figures(first)[0] and len(started) == 8
    judged(tmp_path, margin, "max_seeds=3", candidate="model.n_heads=4")  # the baseline is trained already
    assert len(started) == 11 and len(list(tmp_path.glob("multirun/*/*/sweep.json"))) == 1
    judged(tmp_path, margin, "max_seeds=3", "seed=1")  # another comparison
    assert len(started) == 17 and len(list(tmp_path.glob("multirun/*/*/sweep.json"))) == 2


def test_a_budget_that_cannot_decide_is_refused_and_a_larger_one_ends_before_the_pair_that_exceeds_it(
    tmp_path, trainer
):
    started = trainer(shifted(0.0))
    message = "budget=59s is too small: a pair of runs takes about 00:00:20, and a verdict needs at least 3 pairs"
    assert_refused(judged(tmp_path, "budget=59s"), message)
    assert started == [] and not list(tmp_path.iterdir())
    done = judged(tmp_path, "margin=0.001", "budget=70s")
    assert len(started) == 6 and done.returncode == 3
    assert "Another pair, about 00:00:20, would exceed the budget of 00:01:10." in done.stdout
    judged(tmp_path, "margin=0.001", "budget=80s")  # the time of finished runs counts
    assert len(started) == 8


def look(n, verdict=UNCLEAR, mean=-0.1):
    return Comparison(Interval(mean, -0.6, 0.4, n), verdict, n, 0.1, 5.0)


@pytest.mark.parametrize(
    ("at", "seconds", "verdict", "reason"),
    [
        (look(1), 700, "undecided", "The 2 pairs that are still needed for a verdict, about 00:23:20, would exceed"),
        (look(5, DIVERGED, math.inf), 60, "worse", "A loss of the candidate is not finite."),
        (look(5, DIVERGED, math.nan), 60, "undecided", "A loss of the baseline is not finite."),
        (look(100), 60, "undecided", "100 pairs of runs did not settle it; the error rate holds for 100 pairs. 100 pa"),
    ],
)
def test_a_look_ends_the_comparison_or_not(at, seconds, verdict, reason):
    ended = conclude(at, seconds, Rules(margin=0.01, seconds=2000.0))
    assert ended[0] == verdict and re.search(reason, ended[1])


def test_a_failed_run_and_different_texts_end_the_referee_with_one_line(tmp_path, trainer):
    message = "error: the causality certificate fails (no future), so the losses of this model would be false"
    trainer(lambda arm, seed: (2, message) if arm == "candidate" else 3.0)
    assert_refused(judged(tmp_path), f"candidate seed=0 failed with status 2: {message[7:]} (multirun/")
    trainer(shifted(0.0), bytes_of={"candidate": 6.0})
    sizes = "the validation texts of the arms differ (768 and 1,536 bytes)"
    assert_refused(judged(tmp_path, "out=other"), sizes)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_runs_and_says_how_to_continue(signum, tmp_path, trainer):
    def losses(arm, seed):
        if (arm, seed) == ("candidate", 1) and len(started) == 3:
            signal.raise_signal(signum)
        return shifted(-0.1)(arm, seed)

    started = trainer(losses)
    done = judged(tmp_path)
    assert done.returncode == 128 + signum and done.stdout == ""
    assert done.stderr.startswith("stopped after 1 pair; the same command continues (multirun/")
    assert judged(tmp_path).returncode == 0
    assert started[:5] == ["baseline 0", "candidate 0", "candidate 1", "candidate 1", "baseline 1"]
