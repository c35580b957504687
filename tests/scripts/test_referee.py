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
from tril.model.comparison import DIVERGED, MAX_PAIRS, MIN_PAIRS, UNCLEAR, Bound, Comparison, compare, looks_half_width
from tril.model.intervals import Interval
from tril.model.runs import find_sweep
from tril.scripts import referee
from tril.scripts.experiments import run_process
from tril.scripts.experiments.referee import Rules, conclude, plan_arms, split_overrides
from tril.scripts.experiments.report import read_report

NOISE = np.random.default_rng(0).standard_normal(200) * 0.01
TARGETS = np.full(12, 50)  # of 12 documents, one window each
ARMS = ("baseline", "candidate")


class Trainer:
    """Replaces `run_process.spawn`: writes what a run leaves, with chosen losses.

    Attributes:
        losses: of the name of the arm and the seed: the mean loss, or a failure (status, last line of the log).
        trained: names and seeds of the runs in the order of their start.
        bytes: per token of the validation text, of each arm.
    """

    def __init__(self, losses):
        self.losses, self.trained, self.bytes = losses, [], {"baseline": 2.0, "candidate": 2.0}

    def __call__(self, arguments, log, lock):
        seed = int(next(text for text in arguments if text.startswith("seed=")).partition("=")[2])
        arm = "candidate" if "model.n_heads=1" in arguments else "baseline"
        self.trained.append(f"{arm} {seed}")
        loss = self.losses(arm, seed)
        if isinstance(loss, tuple):
            log.write_text(f"model ...\n{loss[1]}\n")
            return loss[0]
        nll = {"nll": loss * TARGETS, "targets": TARGETS, "document_nll": loss * TARGETS, "document_targets": TARGETS}
        np.savez(log.parent / "windows_last.npz", step=5, context_length=50, **nll)
        summary = {"final_val_loss": loss, "final_val_bpb": loss / 2, "seconds": 10.0, "data_fingerprint": "a"}
        summary |= {"val_bytes_per_token": self.bytes[arm]}
        finite = {name: None if value != value else value for name, value in summary.items()}
        (log.parent / "summary.json").write_text(json.dumps(finite))
        return 0


@pytest.fixture
def trainer(monkeypatch):
    """A function that sets the losses of the runs and returns the stand-in. A pair is estimated to take 20 seconds."""

    def estimate(runs):
        for run in runs:
            run.sizes["estimated_seconds"] = 10.0
        return list(runs), []

    def with_losses(losses):
        stand_in = Trainer(losses)
        monkeypatch.setattr(run_process, "spawn", stand_in)
        return stand_in

    monkeypatch.setattr("tril.scripts.experiments.grid.estimate_runs", estimate)
    monkeypatch.setattr("tril.scripts.experiments.report.draw", lambda *_: {})  # takes seconds
    return with_losses


COMMON = "common=" + " ".join(TINY[1:])  # on the default text


def judged(cwd, *arguments, candidate="model.n_heads=1"):
    return call(referee.main, f"candidate={candidate}", COMMON, *arguments, cwd=cwd)


def shifted(by):
    """Losses with noise, different in each arm; the candidate's are higher by `by`."""
    return lambda arm, seed: 3.0 + NOISE[seed] + (by + NOISE[-1 - seed] if arm == "candidate" else 0.0)


def figures(done):
    return [float(number) for number in re.findall(r"[+-]\d\.\d{4}", done.stdout)]


@pytest.mark.parametrize(
    ("by", "margin", "verdict", "status"),
    [(-0.1, 0.005, "better", 0), (0.1, 0.005, "worse", 1), (0.0, 0.02, "equal", 1), (0.0, 0.001, "undecided", 3)],
)
def test_it_ends_at_the_first_look_with_a_verdict(by, margin, verdict, status, tmp_path, trainer):
    trained = trainer(shifted(by)).trained
    done = judged(tmp_path, f"margin={margin}", "max_seeds=9")
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(f"{verdict}: candidate - baseline = ") and done.stdout.count("\n") == 1
    n = len(trained) // 2
    assert n == 9 if verdict == "undecided" else n < 9
    order = ["baseline 0", "candidate 0", "candidate 1", "baseline 1", "baseline 2", "candidate 2"]
    assert trained[:6] == order
    losses = np.array(
        [[loss(arm, seed) for seed in range(n)] for loss, arm in zip([shifted(by)] * 2, ARMS, strict=True)]
    )
    looks = [
        compare(losses[:, :i, None], np.ones(1), margin=margin, bound=Bound.EVERY_LOOK)[0] for i in range(3, n + 1)
    ]  # all documents of a pair differ alike, so the text adds nothing
    assert {look.verdict for look in looks[:-1]} <= {UNCLEAR}
    last = looks[-1].difference
    assert figures(done) == pytest.approx([last.mean, last.low, last.high], abs=6e-5)


def test_its_folder_and_its_report_are_those_of_a_sweep(tmp_path, trainer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer(shifted(-0.1))
    done = judged(tmp_path, "margin=0.02")
    folder = find_sweep("latest")
    assert done.stdout.endswith(f" {folder / 'report.md'}\n")
    page = (folder / "report.md").read_text()
    assert (
        "# Referee over model.n\\_heads" in page.replace("n_heads", "n\\_heads") and "on the same text (12 doc" in page
    )
    assert "hold the true difference. Each candidate is a comparison" in page and "± 0.02 nats per token." in page
    assert f"{figures(done)[0]:+.4f} ± " in page
    [each] = read_report(folder).comparisons.values()
    assert figures(done) == pytest.approx([each.difference.mean, each.difference.low, each.difference.high], abs=6e-5)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        f"model.n_heads={heads},seed={seed}" for heads in (1, 2) for seed in range(each.seeds)
    }
    [launch] = json.loads((folder / "sweep.json").read_text())["launches"]
    assert launch["seeds"] == list(range(each.seeds)) and launch["command"].startswith("python scripts/referee.py ")


def test_the_same_command_trains_nothing_again_and_other_commands_share_its_runs(tmp_path, trainer):
    trained = trainer(shifted(0.0)).trained
    options = ["margin=0.001", "quiet=true"]
    first = judged(tmp_path, *options, "max_seeds=4")
    assert len(trained) == 8 and first.stderr == "" and first.returncode == 3
    assert "4 pairs of runs did not settle it. 4 pairs find a difference of " in first.stdout
    assert judged(tmp_path, *options, "max_seeds=4").stdout == first.stdout and len(trained) == 8
    judged(tmp_path, *options, "max_seeds=6")
    assert trained[8:] == ["baseline 4", "candidate 4", "candidate 5", "baseline 5"]
    swapped = judged(tmp_path, "baseline=model.n_heads=1", *options, "max_seeds=4", candidate="model.n_heads=2")
    assert figures(swapped)[0] == -figures(first)[0] and len(trained) == 12
    judged(tmp_path, *options, "max_seeds=3", candidate="model.n_heads=4")  # the baseline is trained already
    assert len(trained) == 15 and len(list(tmp_path.glob("multirun/*/*/sweep.json"))) == 1
    judged(tmp_path, *options, "max_seeds=3", "seed=1")  # another comparison
    assert len(trained) == 21 and len(list(tmp_path.glob("multirun/*/*/sweep.json"))) == 2


def test_a_budget_that_cannot_decide_is_refused_and_a_larger_one_ends_before_the_pair_that_exceeds_it(
    tmp_path, trainer
):
    trained = trainer(shifted(0.0)).trained
    message = "budget=59s is too small: a pair of runs takes about 00:00:20, and a verdict needs at least 3 pairs"
    assert_refused(judged(tmp_path, "budget=59s", "quiet=true"), message)
    assert trained == [] and not list(tmp_path.iterdir())
    done = judged(tmp_path, "margin=0.001", "budget=110s")
    assert len(trained) == 10 and done.returncode == 3
    assert "Another pair, about 00:00:20, would exceed the budget of 00:01:50." in done.stdout
    assert judged(tmp_path, "margin=0.001", "budget=110s").stdout == done.stdout  # the time of finished runs counts
    judged(tmp_path, "margin=0.001", "budget=120s")
    assert len(trained) == 12


def look(n, verdict=UNCLEAR, mean=-0.1):
    return Comparison(Interval(mean, -0.6, 0.4, n), verdict, n, 0.1, 5.0)


@pytest.mark.parametrize(
    ("at", "seconds", "verdict", "reason"),
    [
        (look(5, "equal within the margin"), 60, "equal", "^$"),
        (look(5), 1600, None, "^$"),
        (look(1), 700, "undecided", "The 2 pairs that are still needed for a verdict, about 00:23:20, would exceed"),
        (look(5, DIVERGED, math.inf), 60, "worse", "A loss of the candidate is not finite."),
        (look(5, DIVERGED, math.nan), 60, "undecided", "A loss of the baseline is not finite."),
        (look(100), 60, "undecided", "100 pairs of runs did not settle it; the error rate holds for 100 pairs. 100 pa"),
    ],
)
def test_a_look_ends_the_comparison_or_not(at, seconds, verdict, reason):
    ended = conclude(at, seconds, Rules(margin=0.01, seconds=2000.0))
    assert ended[0] == verdict and re.search(reason, ended[1])


def test_the_least_number_of_pairs_is_that_of_the_first_interval():
    assert [math.isfinite(looks_half_width(n, 1.0)) for n in range(2, 5)] == [n >= MIN_PAIRS for n in range(2, 5)]
    assert MAX_PAIRS == 100  # as the help says


@pytest.mark.parametrize("quiet", ["true", "false"])
def test_a_failed_run_ends_the_referee_with_one_line(quiet, tmp_path, trainer):
    message = "error: the causality certificate fails (no future), so the losses of this model would be false"
    trainer(lambda arm, seed: (2, message) if arm == "candidate" else 3.0)
    done = judged(tmp_path, f"quiet={quiet}")
    assert done.returncode == 2 and done.stdout == ""
    expected = f"error: candidate seed=0 failed with status 2: {message.removeprefix('error: ')} (multirun/"
    assert done.stderr.splitlines()[-1].startswith(expected)


def test_arms_with_different_validation_texts_are_refused(tmp_path, trainer):
    trainer(shifted(0.0)).bytes["candidate"] = 4.0
    assert_refused(judged(tmp_path, "quiet=true"), "the validation texts of the arms differ (1,200 and 2,400 bytes)")


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM")])
def test_a_signal_keeps_the_runs_and_says_how_to_continue(signum, name, tmp_path, trainer):
    def losses(arm, seed):
        if (arm, seed) == ("candidate", 1) and len(stand_in.trained) == 3:
            signal.raise_signal(signum)
        return shifted(-0.1)(arm, seed)

    stand_in = trainer(losses)
    done = judged(tmp_path, "quiet=true")
    assert done.returncode == 128 + signum and done.stdout == ""
    assert done.stderr.startswith("stopped after 1 pair; the same command continues (multirun/")
    assert judged(tmp_path).returncode == 0
    assert stand_in.trained[:5] == ["baseline 0", "candidate 0", "candidate 1", "candidate 1", "baseline 1"]


def test_wrong_input_is_one_line(tmp_path):
    for arguments, message in (
        ([], 'candidate is missing; name what it changes, as in candidate="model.n_heads=8"'),
        (["candidate="], "baseline and candidate have the same settings; set what the candidate changes"),
        (["candidate=hydra/launcher=joblib"], "hydra/launcher=joblib cannot be set for an arm; the referee chooses"),
        (["candidate=causality.allow_leak=true"], "causality.allow_leak=true allows false losses; the referee"),
        (["candidate=callbacks.causality=null"], "callbacks.causality=null leaves out the certificate; the referee"),
    ):
        assert_refused(call(referee.main, *arguments, cwd=tmp_path), message)
    assert not list(tmp_path.iterdir())


def test_settings_of_an_arm_replace_common_ones_and_differences_are_swept():
    overrides = split_overrides("model.dim=64 optim=adamw data.path='my text'", "model.dim=32 +a.b=1")
    assert overrides == ["model.dim=32", "optim=adamw", "data.path=my text", "+a.b=1"]
    arms = plan_arms(["optim=adamw", "optim=muon model.dim=64"], "model.n_layers=2 model.dim=32", 5)
    assert [arm.values for arm in arms] == [
        {"optim": name, "model.dim": n} for name, n in (("adamw", 32), ("muon", 64))
    ]
    assert [arm.seed for arm in arms] == [5, 5]
