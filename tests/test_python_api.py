"""train() in a process that goes on, and what signals do to a run: the step ends, a checkpoint, a status and a line."""

import random
import re
import signal

import numpy as np
import pytest

from tests.runs import DRAWN_BY, TINY, in_process, small_picture
from tril import train
from tril.model.checkpoint import read_state
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.module import TrainingModule
from tril.scripts.cli.errors import UserError

QUICK = (*TINY, "data.path=text.txt", "~callbacks.causality", "~callbacks.samples", "~callbacks.heads")
WAITS = "the run stops after this step; Ctrl-C again stops it at once\n"


@pytest.fixture(autouse=True)
def folder(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DRAWN_BY, small_picture)
    return tmp_path


@pytest.fixture
def send(monkeypatch):
    """send(signum, ...) lets the next call of a method, by default a training step, get the signals."""

    def send(*signums, owner=TrainingModule, method="training_step"):
        original = getattr(owner, method)

        def called(*arguments, **options):
            monkeypatch.setattr(owner, method, original)
            for signum in signums:
                signal.raise_signal(signum)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, called)

    return send


def test_a_wrong_setting_shows_no_frames_and_after_a_bug_its_cause_and_the_random_numbers_are_kept(folder, monkeypatch):
    before = set(folder.rglob("*"))
    for setting, message in (
        ("-m", "'-m' is no setting of a run"),
        ({"seed": 1}, "{'seed': 1} is no setting of a run"),
        ("trainer.devices=2", "trainer.strategy=auto with trainer.devices=2 starts processes"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            train(*QUICK, setting)
        frames = {entry.path.name for entry in raised.traceback}
        assert frames <= {"test_python_api.py", "api.py", "callable_module.py"}
    assert set(folder.rglob("*")) == before

    randoms = random.getstate(), np.random.get_state()[1].tolist()

    def broken(*_, **__):
        random.random(), np.random.rand()
        raise RuntimeError("a bug") from KeyError("its cause")

    monkeypatch.setattr(train, "build_module", broken)
    with pytest.raises(RuntimeError, match="a bug") as raised:
        train(*QUICK)
    assert isinstance(raised.value.__cause__, KeyError)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == randoms


def test_ctrl_c_writes_a_checkpoint_and_a_second_one_does_not_wait(folder, send, capsys):
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        train(*QUICK, "hydra.run.dir=stopped")
    place = folder / "stopped"
    assert str(raised.value) == f'stopped by Ctrl-C at step 1; continue with train("resume={place}")'
    assert train(f"resume={place}").summary["steps"] == 8
    send(signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C at step 0; there is no checkpoint yet"):
        train(*QUICK, "hydra.run.dir=at_once")
    assert capsys.readouterr().err.count(WAITS) == 2


def test_sigterm_goes_to_the_handler_of_the_process_after_the_checkpoint(folder, send):
    received = []

    def handler(signum, frame):
        received.append((signum, (folder / "ended" / "checkpoints" / "last.ckpt").is_file()))

    before = signal.signal(signal.SIGTERM, handler)
    try:
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM at step 1; continue with "):
            train(*QUICK, "hydra.run.dir=ended")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [(signal.SIGTERM, True)]


@pytest.mark.parametrize(
    ("signum", "at", "settings", "step"),
    [
        (signal.SIGTERM, (CausalityCheck, "on_fit_start"), ["callbacks.causality={}"], 0),  # at once
        (signal.SIGTERM, (TrainingModule, "validation_step"), [], 4),
        (signal.SIGUSR1, (TrainingModule, "training_step"), ["trainer.val_check_interval=1"], 1),  # of Slurm
    ],
)
def test_a_signal_ends_the_step_writes_a_checkpoint_and_gives_the_status(send, folder, signum, at, settings, step):
    send(signum, owner=at[0], method=at[1])
    done = in_process(*QUICK, "hydra.run.dir=run", *settings, cwd=folder)
    remedy = f"continue with python train.py resume={folder / 'run'}" if step else "there is no checkpoint yet"
    line = f"stopped by {signum.name} at step {step}; {remedy}\n"
    errors = re.sub(r"\Avalidation is .+\n", "", done.stderr)  # which the first start on a text prints
    assert (done.returncode, errors) == (128 + signum, line)
    assert not (folder / "run" / "summary.json").exists()
    assert not step or read_state(folder / "run" / "checkpoints" / "last.ckpt")["global_step"] == step
