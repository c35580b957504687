"""train() in a process that goes on, and what signals do to a run: the step ends, a checkpoint, a status and a line."""

import re
import signal
from functools import partial

import pytest

from tests.contract.harness import BARE, DRAWN_BY, run, small_picture
from tril.model.checkpoint import read_state
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.module import TrainingModule
from tril.scripts.cli.errors import UserError
from tril.train import train

QUICK = (*BARE, "data.path=text.txt", "hydra.run.dir=run")
TERM = signal.SIGTERM
SIGNALS = [  # what comes, in which call, of a run with these settings, and the step of the checkpoint
    (TERM, (CausalityCheck, "on_fit_start"), ["callbacks.causality={}"], 0),  # at once
    (TERM, (TrainingModule, "validation_step"), [], 4),
    (signal.SIGUSR1, (TrainingModule, "training_step"), ["trainer.val_check_interval=1"], 1),  # of Slurm
]


@pytest.fixture(autouse=True)
def folder(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DRAWN_BY, small_picture)
    return tmp_path


@pytest.fixture
def before_next(monkeypatch):
    """A function: the next call of a method first makes other calls."""

    def before_next(owner, method, *calls):
        original = getattr(owner, method)

        def called(*arguments, **options):
            monkeypatch.setattr(owner, method, original)
            for call in calls:
                call()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, called)

    return before_next


def step_of(run):
    return read_state(run / "checkpoints" / "last.ckpt")["global_step"]


def test_a_wrong_setting_shows_no_frames_and_a_bug_shows_its_cause(folder, before_next):
    before = set(folder.rglob("*"))
    for setting, message in (
        ("-m", "'-m' is no setting of a run"),
        ({"seed": 1}, "{'seed': 1} is no setting of a run"),
        ("trainer.devices=2", "trainer.strategy=auto with trainer.devices=2 starts processes"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            train(*QUICK, setting)
        assert {entry.path.name for entry in raised.traceback} <= {"test_python_api.py", "train.py"}
    assert set(folder.rglob("*")) == before

    def bug():
        raise RuntimeError("a bug") from KeyError("its cause")

    before_next(TrainingModule, "training_step", bug)
    with pytest.raises(RuntimeError, match="a bug") as raised:
        train(*QUICK)
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_signal_stops_train_with_a_checkpoint_unless_a_second_one_comes(folder, before_next, capsys):
    """SIGTERM then goes to the handler of the process."""
    interrupt, received = partial(signal.raise_signal, signal.SIGINT), []
    before_next(TrainingModule, "training_step", interrupt, interrupt)
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C at step 0; there is no checkpoint yet"):
        train(*QUICK, "hydra.run.dir=at_once")
    before_next(TrainingModule, "training_step", interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        train(*QUICK)
    assert str(raised.value) == f'stopped by Ctrl-C at step 1; continue with train("resume={folder / "run"}")'
    line = "the run stops after this step; Ctrl-C again stops it at once\n"
    assert capsys.readouterr().err.count(line) == 2

    handler = lambda *_: received.append(step_of(folder / "run"))  # noqa: E731
    before = signal.signal(TERM, handler)
    try:
        before_next(TrainingModule, "training_step", partial(signal.raise_signal, TERM))
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM at step 2; continue with "):
            train("resume=run")
        assert signal.getsignal(TERM) is handler and received == [2]
    finally:
        signal.signal(TERM, before)
    assert train("resume=run").summary["steps"] == 8


@pytest.mark.parametrize(("signum", "at", "settings", "step"), SIGNALS)
def test_a_signal_ends_the_step_writes_a_checkpoint_and_gives_the_status(
    before_next, folder, signum, at, settings, step
):
    before_next(*at, partial(signal.raise_signal, signum))
    done = run("train", *QUICK, *settings, cwd=folder)
    remedy = f"continue with python train.py resume={folder / 'run'}" if step else "there is no checkpoint yet"
    errors = re.sub(r"\Avalidation is .+\n", "", done.stderr)  # which the first start on a text prints
    assert (done.returncode, errors) == (128 + signum, f"stopped by {signum.name} at step {step}; {remedy}\n")
    assert not (folder / "run" / "summary.json").exists()
    assert not step or step_of(folder / "run") == step
