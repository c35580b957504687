"""The certificate that a run stores in its checkpoints, and what scripts/certify.py says about it."""

import json

import pytest

from tests.calls import call
from tests.runs import in_process, interrupted, train_typed
from tril.model.checkpoint import Checkpoint, read_state, verdict, write_state
from tril.model.training import checkpoints
from tril.scripts.certify import main


@pytest.fixture
def every_verdict(monkeypatch):
    """The verdict on each checkpoint that a run writes, by its step."""
    verdicts, original = {}, checkpoints.write_and_rotate

    def changed(path, content, is_best):
        original(path, content, is_best)
        verdicts[content["global_step"]] = verdict(Checkpoint.read(path))

    monkeypatch.setattr(checkpoints, "write_and_rotate", changed)
    return verdicts


def test_every_checkpoint_of_a_run_says_which_weights_were_tested(configure, tmp_path, every_verdict):
    """Also when the run goes on in a new process, with another backend."""
    steps = ["checkpoint.every_n_steps=3", "callbacks.samples=null"]
    with interrupted():
        train_typed(configure(*steps))
    random, belongs = "passed before training, with random weights", "to these weights, config and code"
    assert every_verdict == {3: f"{random}; does not belong {belongs}", 4: f"passed at step 4; belongs {belongs}"}
    every_verdict.clear()
    resumed = in_process("resume=run", "model.backend=explicit", f"data.cache_dir={tmp_path / 'cache'}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert every_verdict == {6: f"{random}; does not belong {belongs}", 8: f"passed at step 8; belongs {belongs}"}
    checkpoints = tmp_path / "run" / "checkpoints"
    assert read_state(checkpoints / "last.ckpt")["tril"]["certificate"]["certified_at_step"] == 8


def test_certify_first_says_what_the_stored_certificate_belongs_to(configure, tmp_path):
    train_typed(configure("callbacks.samples=null"))
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"

    def certified(path, out):
        done = call(main, f"ckpt={path}", "device=cpu", f"out={out}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[0], json.loads((tmp_path / out / "causality.json").read_text())

    line, written = certified(last, "first")
    assert line == "stored certificate: passed at step 8; belongs to these weights, config and code"
    assert written["passed"] and written["stored_certificate"] == line.partition(": ")[2]
    assert {"shift", "targets", "canary"} <= written["checks"].keys()
    content = read_state(last)
    content["tril"]["config"]["window"] = 7
    write_state(tmp_path / "changed.ckpt", content)
    line, written = certified("changed.ckpt", "second")
    assert line == "stored certificate: passed at step 8; does not belong to these weights, config and code"
