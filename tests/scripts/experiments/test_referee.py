"""scripts/referee.py with a stand-in for training: looks, verdicts, exit statuses, and the sweep that it leaves."""

import numpy as np
import pytest

from tests.contract.harness import TINY, run
from tests.scripts.experiments.synthetic import launches_of
from tril.model.comparison import compare
from tril.scripts.experiments.losses import launch_alpha

NOISE = np.random.default_rng(0).standard_normal(200) * 0.01
COMMON = "common=" + " ".join([*TINY, "data.path=text.txt"])


@pytest.fixture
def judge(processes, here):
    """A function: sets the candidate's disadvantage, or how its runs end, and returns the result and the losses."""

    def judge(by, *settings, candidate="model.n_heads=1"):
        losses = {}

        def outcome(given):
            heads, seed = given.get("model.n_heads", "2"), int(given["seed"])
            if heads == "1" and isinstance(by, tuple):
                return by
            loss = 3.0 + NOISE[seed] + (by + NOISE[-1 - seed] if heads == "1" else 0.0)
            losses[heads, seed] = loss
            return {"loss": loss}

        processes(outcome)
        return run("referee", f"candidate={candidate}", COMMON, *settings, cwd=here), losses

    return judge


@pytest.mark.parametrize(
    ("by", "margin", "words", "status"),
    [(-0.1, 0.005, "Better: ", 0), (0.1, 0.005, "Worse: ", 1), (0.0, 0.2, "Equal within", 1), (0, 1e-4, "Not dis", 3)],
)
def test_it_ends_at_the_first_look_with_a_verdict(by, margin, words, status, judge, here):
    done, losses = judge(by, f"margin={margin}", "max_seeds=5")
    assert done.returncode == status, done.stderr
    assert words in done.stdout.splitlines()[-1 - (status == 3)]
    n = len(losses) // 2
    assert n == 5 if status == 3 else n <= 5
    table = np.array([[losses[heads, seed] for seed in range(n)] for heads in "21"])[..., None]
    verdicts = [
        compare(table[:, :seeds], np.ones(1), launch_alpha(1 + seeds - 3), margin, paired=False)[0].verdict
        for seeds in range(3, n + 1)
    ]
    assert {*verdicts[:-1]} <= {"not distinguishable"} and verdicts[-1].startswith(words.split()[0].strip(":").lower())
    [path] = here.glob("multirun/*/launches.jsonl")  # an ordinary sweep, with a launch for each look
    assert [each["seeds"] for each in launches_of(here)] == [[0, 1, 2], *([i] for i in range(3, n))]
    assert (path.parent / "report.md").read_text().startswith("# Sweep over model.n_heads\n")


def test_the_same_command_continues_and_a_budget_ends_it(judge):
    done, losses = judge(0.0, "margin=1e-4", "budget=0.001s")
    assert done.returncode == 3 and len(losses) == 6 and "undecided: budget or max_seeds is spent" in done.stdout
    done, losses = judge(0.0, "margin=1e-4", "max_seeds=4")
    assert done.returncode == 3 and [*losses] == [("2", 3), ("1", 3)]


def test_a_failed_run_ends_it(judge):
    done, _ = judge((2, "error: out of memory"))
    assert done.returncode == 2 and "model.n_heads=1,seed=0 is failed" in done.stderr


def test_other_variants_of_the_folder_do_not_matter(judge, here):
    assert judge(-0.1)[0].returncode == 0
    run("train", "-m", *TINY, "data.path=text.txt", "model.n_heads=1,2,4", "seed=0", cwd=here).succeeded()
    [other] = here.glob("multirun/*/model.n_heads=4,seed=0/summary.json")
    other.unlink()
    assert judge(-0.1)[0].returncode == 0


def test_the_option_of_a_group_that_the_baseline_has_is_named(judge, here):
    judge(0.0, "max_seeds=3", candidate="optim=adamw")
    assert [each["values"] for each in launches_of(here)[0]["runs"][:2]] == [{"optim": "muon"}, {"optim": "adamw"}]
