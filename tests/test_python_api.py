"""train() in a process that goes on, and what signals do to a run: the step ends, a checkpoint, a status and a line."""

import gc
import logging
import random
import re
import signal
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from tests.contract.harness import run
from tests.runs import DRAWN_BY, TINY, in_process, small_picture
from tril import train
from tril.model.checkpoint import read_state
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.module import TrainingModule
from tril.scripts.cli.config import CONFIGS
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


def state_of_process() -> dict:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "signals": [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)],
        "garbage": (gc.isenabled(), gc.get_freeze_count()),
        "warnings": list(warnings.filters),
        "precision": torch.get_float32_matmul_precision(),
        "levels": [logging.getLogger(name).level for name in ("", "lightning.pytorch", "lightning.fabric")],
        "handlers": list(logging.root.handlers),
        "hydra": (GlobalHydra.instance().hydra, HydraConfig.instance().cfg),
    }


def test_a_run_in_a_process_that_keeps_its_state(monkeypatch):
    """The state is not that of a new process, and the run is the same bit for bit."""
    monkeypatch.setattr(sys, "argv", ["notebook", "-m"])
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.INFO)
    first, build = train(*QUICK), train.build_module
    monkeypatch.setattr(train, "build_module", lambda *rest: (np.random.rand(), random.random(), build(*rest))[2])
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    torch.set_float32_matmul_precision("medium")
    warnings.simplefilter("default", ImportWarning)  # before the filters of the first run
    gc.disable()
    try:
        with initialize_config_dir(str(CONFIGS), job_name="program", version_base="1.2"):
            HydraConfig.instance().set_config(compose("logger/tensorboard", return_hydra_config=True))
            before = state_of_process()
            again = train(*QUICK)
            assert state_of_process() == before and HydraConfig.get().job.name == "program"
            assert "tensorboard" in compose("logger/tensorboard").logger  # the program goes on with its configs
    finally:
        gc.enable()
        torch.set_float32_matmul_precision("highest")
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    assert again.folder != first.folder and again.summary["final_val_loss"] == first.summary["final_val_loss"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("-m", "'-m' is no setting of a run; settings are strings, such as"),
        ({"seed": 1}, "{'seed': 1} is no setting of a run"),
        ("trainer.devices=2", "trainer.strategy=auto with trainer.devices=2 starts processes"),
        ("model.n_heads=3", "model.n_heads=3 must divide"),
    ],
)
def test_what_is_refused_is_one_line_without_frames(setting, message, folder, capfd):
    before = set(folder.rglob("*"))
    with pytest.raises(UserError) as raised:
        train(*QUICK, setting)
    assert str(raised.value).startswith(message) and set(folder.rglob("*")) == before
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert {entry.path.name for entry in raised.traceback} <= {"test_python_api.py", "api.py", "callable_module.py"}
    assert capfd.readouterr() == ("", "")


def test_an_error_of_a_run_keeps_its_cause(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug") from KeyError("its cause")

    monkeypatch.setattr(train, "build_module", broken)
    with pytest.raises(RuntimeError, match="a bug") as raised:
        train(*QUICK)
    assert isinstance(raised.value.__cause__, KeyError)


def test_ctrl_c_writes_a_checkpoint_and_a_second_one_does_not_wait(folder, send):
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        train(*QUICK, "hydra.run.dir=stopped")
    place = folder / "stopped"
    assert str(raised.value) == f'stopped by Ctrl-C at step 1; continue with train("resume={place}")'
    assert train(f"resume={place}").summary["steps"] == 8
    send(signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C at step 0; there is no checkpoint yet"):
        train(*QUICK, "hydra.run.dir=at_once")


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
    assert (done.returncode, after_preparing(done.stderr)) == (128 + signum, line)
    assert not (folder / "run" / "summary.json").exists()
    assert not step or read_state(folder / "run" / "checkpoints" / "last.ckpt")["global_step"] == step


def endless_steps():
    """Every step prints a line between two signals, and then never ends."""

    def endless(self, batch, batch_idx):
        signal.raise_signal(signal.SIGINT)
        print("still here", flush=True)
        signal.raise_signal(signal.SIGINT)
        time.sleep(300)

    TrainingModule.training_step = endless


def test_a_second_signal_leaves_a_step_that_never_ends(folder):
    done = run("train", *QUICK, cwd=folder, before=endless_steps)
    assert done.status == 130 and done.out.endswith("still here\n"), done.err
    assert after_preparing(done.err) == WAITS + "stopped by Ctrl-C at step 0; there is no checkpoint yet\n"


def after_preparing(errors: str) -> str:
    """stderr without the line about the split, which the first start on a text prints."""
    return re.sub(r"\Avalidation is .+\n", "", errors)
