"""From Python: train() in a process that goes on, load(), the notebook, and what signals do to a run.

python -m pytest -n0 tests/test_python_api.py
"""

import json
import logging
import math
import os
import signal
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from tests.contract.harness import BARE, DRAWN_BY, ROOT, metrics, run, small_picture, summary
from tril.model import load
from tril.model.checkpoint import read_state
from tril.model.training.module import TrainingModule
from tril.scripts.cli.errors import UserError
from tril.train import train

QUICK = (*BARE, "data.path=text.txt", "hydra.run.dir=run")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
WRONG = [  # settings, keyword arguments, and the name of what is wrong
    (["-m"], {}, "-m"),
    ([{"seed": 1}], {}, "seed"),
    ([], {"seed": 1}, "seed"),
    (["trainer.devices=2"], {}, "trainer.devices=2"),
    *(([setting], {}, setting.partition("=")[0]) for setting in ("model.n_heads=3", "modle=nano", "data.path=no.txt")),
]
STOPS = [  # the call in which the signal comes, a setting, and the step of the checkpoint
    ("training_step", "trainer.val_check_interval=1", 1),
    ("validation_step", "seed=1", 4),
    ("training_step", "trainer.max_steps=1", 1),
]


@pytest.fixture
def folder(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DRAWN_BY, small_picture)
    return tmp_path


def before_next(method, *calls):
    """The next call of a method of TrainingModule first makes other calls."""
    original = getattr(TrainingModule, method)

    def called(*arguments):
        patch.stop()
        for call in calls:
            call()
        return original(*arguments)

    patch = mock.patch.object(TrainingModule, method, called)
    patch.start()


def step_of(run):
    return read_state(run / "checkpoints" / "last.ckpt")["global_step"]


@pytest.mark.parametrize(("settings", "keywords", "name"), WRONG)
def test_a_wrong_setting_is_an_error_without_frames_that_leaves_nothing(settings, keywords, name, folder):
    before = set(folder.rglob("*"))
    with pytest.raises(UserError, match=name) as raised:
        train(*QUICK, *settings, **keywords)
    if name in ("model.n_heads", "modle", "data.path"):
        assert run("train", *QUICK, *settings, cwd=folder).stderr == f"error: {raised.value}\n"
    assert isinstance(raised.value, ValueError)
    assert {entry.path.name for entry in raised.traceback} <= {"test_python_api.py", "train.py"}
    assert set(folder.rglob("*")) == before


def test_a_signal_ends_the_step_and_train_raises_keyboard_interrupt(folder):
    before = [signal.getsignal(signum) for signum in SIGNALS]
    for step, signum in enumerate(SIGNALS, 1):
        before_next("training_step", partial(signal.raise_signal, signum))
        with pytest.raises(KeyboardInterrupt, match=f"step {step}; .*resume="):
            train(*(["resume=run"] if step > 1 else QUICK))
        assert step_of(folder / "run") == step and [signal.getsignal(signum) for signum in SIGNALS] == before
    assert train("resume=run").summary["steps"] == 8


def test_a_second_signal_acts_at_once(folder):
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    before_next("training_step", interrupt, interrupt)
    done = run("train", *QUICK, cwd=folder)
    assert done.returncode == 128 + signal.SIGINT and not (folder / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("at", "setting", "step"), STOPS)
def test_a_signal_ends_the_step_with_its_validation_a_status_and_a_line(folder, at, setting, step):
    before_next(at, partial(signal.raise_signal, signal.SIGTERM))
    done = run("train", *QUICK, setting, cwd=folder)
    assert done.returncode == 128 + signal.SIGTERM and f"resume={folder / 'run'}" in done.stderr.splitlines()[-1]
    assert step_of(folder / "run") == step and not (folder / "run" / "summary.json").exists()


def process_state() -> tuple:
    signals = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    return logging.root.handlers[:], signals, list(sys.argv), os.getcwd(), GlobalHydra.instance().hydra


def test_train_is_the_command_and_keeps_signal_handlers_and_the_hydra_of_its_caller(folder, texts, monkeypatch):
    settings = (*BARE, f"data.path={texts}")
    done = run("train", *settings, "hydra.run.dir=typed", cwd=folder).succeeded()
    assert f"tril sample ckpt={folder / 'typed'} prompt" in done.stdout
    monkeypatch.setattr(GlobalHydra.instance(), "hydra", "of a program that calls train()")
    before = process_state()
    called = train(*settings)
    assert process_state() == before
    assert called.folder.parents[2] == folder and called.summary == summary(called.folder)
    losses = {row["step"]: row["val/loss"] for row in called.metrics if "val/loss" in row}
    assert losses == metrics(folder / "typed", "val/loss")
    models = [load("typed"), load(called.folder), load("latest", device="cpu"), called.load()]
    assert models[0].config.n_heads == 2 and models[0].tokenizer.get_vocab_size() == 300
    ids = torch.arange(32)[None]
    assert all(torch.equal(lm.model(ids), models[0].model(ids)) for lm in models)
    (text,) = {lm.generate("The dog", max_new_tokens=20, seed=1) for lm in models}
    assert "".join(models[0].stream("The dog", max_new_tokens=20, seed=1)) == text


def test_an_unknown_name_is_named():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from tril.model import nothing  # noqa: F401


@pytest.mark.slow
def test_the_notebook_runs_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the notebook makes its folder
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=lambda *_, **__: None))
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text("utf-8"))["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    lowest = 6 / 14 * math.log(8) * (1 + 6 / 57)  # six random letters of 14 characters, in windows of 57
    assert lowest < names["loss"] < lowest + 0.15
    assert names["short_loss"] > 12 / 14 * math.log(8)  # a window of 4 keys cannot copy
    assert names["certificate"].passed and not names["leaks"].passed


def test_a_bug_shows_its_cause(folder):
    def bug():
        raise RuntimeError("a bug") from KeyError("its cause")

    before_next("training_step", bug)
    with pytest.raises(RuntimeError, match="a bug") as raised:
        train(*QUICK)
    assert isinstance(raised.value.__cause__, KeyError)
