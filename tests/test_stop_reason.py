"""Runs that end before trainer.max_steps say why, and resuming them without a step left changes nothing."""

import json

import pytest

from tests.conftest import assert_refused
from tests.runs import TINY, in_process
from tests.test_finetune import files

MANY = ["trainer.max_steps=100000", "trainer.val_check_interval=100000", "callbacks.samples=null"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("trainer.max_time=00:00:00:01", "trainer.max_time=00:00:00:01 is over"),
        ("+trainer.max_epochs=1", "trainer.max_epochs=1 is reached"),
    ],
)
def test_a_run_that_a_limit_ends(tmp_path, text, setting, reason):
    short = ["+trainer.limit_train_batches=3"] if "epochs" in setting else []
    done = in_process(*TINY, *MANY, *short, setting, f"data.path={text}", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    summary, before = json.loads((run / "summary.json").read_text()), files(run)
    steps = summary["steps"]
    assert summary["stopped_early"] == f"at step {steps:,} of 100,000: {reason}"
    assert f"stopped     at step {steps:,} of 100,000: {reason}\n" in done.stdout
    assert (run / "checkpoints" / "last.ckpt").is_file() and (not short or steps == 3)
    again = in_process("resume=run", cwd=tmp_path)
    limit = setting.lstrip("+")
    assert again.returncode == 0 and f"has stopped at step {steps:,} by {limit}; it is unchanged" in again.stdout
    other = in_process("resume=run", "optim.lr=0.5", cwd=tmp_path)
    remedy = f"; raise {limit.partition('=')[0]} to continue it, or start a new run"
    assert_refused(other, f"run has stopped at step {steps:,} by {limit} without optim.lr", remedy)
    assert files(run) == before
    if short:
        more = in_process("resume=run", "trainer.max_epochs=2", cwd=tmp_path)
        assert more.returncode == 0, more.stderr
        assert json.loads((run / "summary.json").read_text())["steps"] > 3


@pytest.mark.parametrize("kind", ["simple", pytest.param("advanced", marks=pytest.mark.slow), "pytorch"])
def test_the_report_of_a_profiler_is_a_file_that_is_named(tmp_path, text, kind):
    short = ["trainer.max_steps=2", f"+trainer.profiler={kind}", "callbacks.samples=null", "hydra.run.dir=run"]
    done = in_process(*TINY, *short, f"data.path={text}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"profile     {tmp_path / 'run' / 'fit-profile.txt'}" in done.stdout
    report = (tmp_path / "run" / "fit-profile.txt").read_text()
    assert ("Self CPU time total" if kind == "pytorch" else "training_step") in report
