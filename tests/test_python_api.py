"""train() in a process that goes on, and what signals do to a run: the step ends, a checkpoint, a status and a line."""

import signal
from functools import partial

import pytest

from tests.contract.harness import BARE, DRAWN_BY, run, small_picture
from tril.model.checkpoint import read_state
from tril.model.training.module import TrainingModule
from tril.scripts.cli.errors import UserError
from tril.train import train

QUICK = (*BARE, "data.path=text.txt", "hydra.run.dir=run")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
STOPS = [  # the call in which the signal comes, settings, and the step of the checkpoint
    ("training_step", ["trainer.accumulate_grad_batches=2"], 1),
    ("training_step", ["trainer.val_check_interval=1"], 1),
    ("validation_step", [], 4),
    ("training_step", ["trainer.max_steps=1"], 1),
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
    for settings, keywords, named in (
        (["-m"], {}, "-m"),
        ([{"seed": 1}], {}, "seed"),
        ([], {"seed": 1}, "seed"),
        (["trainer.devices=2"], {}, "trainer.devices=2"),
    ):
        with pytest.raises(UserError, match=named) as raised:
            train(*QUICK, *settings, **keywords)
        assert {entry.path.name for entry in raised.traceback} <= {"test_python_api.py", "train.py"}
    assert set(folder.rglob("*")) == before

    def bug():
        raise RuntimeError("a bug") from KeyError("its cause")

    before_next(TrainingModule, "training_step", bug)
    with pytest.raises(RuntimeError, match="a bug") as raised:
        train(*QUICK)
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_signal_ends_the_step_and_train_raises_keyboard_interrupt(folder, before_next):
    before = [signal.getsignal(signum) for signum in SIGNALS]
    for step, signum in enumerate(SIGNALS, 1):
        before_next(TrainingModule, "training_step", partial(signal.raise_signal, signum))
        with pytest.raises(KeyboardInterrupt, match=f"at step {step}; continue with "):
            train(*(["resume=run"] if step > 1 else QUICK))
        assert step_of(folder / "run") == step and [signal.getsignal(signum) for signum in SIGNALS] == before
    assert train("resume=run").summary["steps"] == 8


def test_a_second_signal_acts_at_once(folder, before_next):
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    before_next(TrainingModule, "training_step", interrupt, interrupt)
    done = run("train", *QUICK, cwd=folder)
    assert done.returncode == 128 + signal.SIGINT and not (folder / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("at", "settings", "step"), STOPS)
def test_a_signal_ends_the_step_with_its_validation_a_status_and_a_line(before_next, folder, at, settings, step):
    before_next(TrainingModule, at, partial(signal.raise_signal, signal.SIGTERM))
    done = run("train", *QUICK, *settings, cwd=folder)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 128 + signal.SIGTERM and f"resume={folder / 'run'}" in line
    assert step_of(folder / "run") == step and not (folder / "run" / "summary.json").exists()
