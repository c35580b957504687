"""Runs that end before trainer.max_steps say why, and resuming them without a step left changes nothing."""

import json

from tests.conftest import assert_refused
from tests.runs import TINY, in_process
from tests.test_finetune import files

MANY = ["trainer.max_steps=100000", "trainer.val_check_interval=100000", "callbacks.samples=null"]


def test_a_run_that_its_time_ends(tmp_path, text):
    done = in_process(
        *TINY, *MANY, "trainer.max_time=00:00:00:03", f"data.path={text}", "hydra.run.dir=run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    summary, before = json.loads((run / "summary.json").read_text()), files(run)
    end = f"at step {summary['steps']:,} of 100,000 by trainer.max_time"
    assert summary["stopped_early"] == end and f"stopped     {end}\n" in done.stdout
    assert (run / "checkpoints" / "last.ckpt").is_file()
    again = in_process("resume=run", cwd=tmp_path)
    stopped = f"has stopped at step {summary['steps']:,} by trainer.max_time"
    assert again.returncode == 0 and f"{stopped}; it is unchanged" in again.stdout
    other = in_process("resume=run", "optim.lr=0.5", cwd=tmp_path)
    assert_refused(other, f"run {stopped} without optim.lr", "; raise trainer.max_time to continue it, or start a new")
    assert files(run) == before
