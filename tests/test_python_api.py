"""`from tril import train; train("model=nano")`: the run of the command, in a process that goes on."""

import gc
import logging
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from tests.runs import TINY
from tril import train
from tril.model.training.module import TrainingModule
from tril.scripts.cli.config import CONFIGS
from tril.scripts.cli.errors import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    text = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRIL_CACHE", str(folder / "cache"))


@pytest.fixture(scope="module")
def run(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TRIL_CACHE", str(folder / "cache"))
        return train(*TINY, "data.path=text.txt")


def test_a_second_run_in_a_process_that_keeps_its_state(run, monkeypatch):
    """The state is not that of a new process, and the run is the same bit for bit."""
    arguments, logger = ["notebook", "-m"], logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(logger, "level", logging.INFO)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    torch.set_float32_matmul_precision("medium")
    warnings.simplefilter("default", ImportWarning)  # before the filters of the first run
    gc.disable()
    try:
        with initialize_config_dir(str(CONFIGS), job_name="program", version_base="1.2"):
            program = compose("logger/tensorboard", return_hydra_config=True)
            HydraConfig.instance().set_config(program)
            before = state_of_process()
            again = train(*TINY, "data.path=text.txt")
            after = state_of_process()
            assert HydraConfig.get().job.name == "program"
            assert "tensorboard" in compose("logger/tensorboard").logger  # the program goes on with its configs
    finally:
        gc.enable()
        torch.set_float32_matmul_precision("highest")
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    assert before == after
    assert again.folder != run.folder
    assert again.summary["final_val_loss"] == run.summary["final_val_loss"]


def state_of_process() -> dict:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "signals": [signal.getsignal(signum) for signum in SIGNALS],
        "garbage": (gc.isenabled(), gc.get_freeze_count()),
        "arguments": sys.argv,
        "warnings": list(warnings.filters),
        "precision": torch.get_float32_matmul_precision(),
        "levels": [logging.getLogger(name).level for name in ("", "lightning.pytorch", "lightning.fabric")],
        "handlers": list(logging.root.handlers),
        "hydra": (GlobalHydra.instance().hydra, HydraConfig.instance().cfg),
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("-m", "'-m' is no setting of a run; settings are strings, such as \"trainer.max_steps=100\"; use grids"),
        ({"seed": 1}, "{'seed': 1} is no setting of a run; settings are strings, such as"),
        ("foo.bar.baz=1", "there is no setting foo.bar.baz; --help=all lists all"),
        (
            "trainer=ddp",
            "trainer.strategy=ddp with trainer.devices=auto starts processes; use tril train in a terminal",
        ),
        (
            "trainer.devices=2",
            "trainer.strategy=auto with trainer.devices=2 starts processes; use tril train in a term",
        ),
    ],
)
def test_what_only_the_command_can_do_is_refused(setting, message, folder):
    before = set(folder.rglob("*"))
    with pytest.raises(UserError) as raised:
        train(setting)
    assert str(raised.value).startswith(message)
    assert set(folder.rglob("*")) == before


def test_a_notebook_shows_the_line_of_a_wrong_setting_alone(capfd):
    with pytest.raises(UserError) as raised:
        train(*TINY, "data.path=text.txt", "model.n_heads=3")
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert capfd.readouterr() == ("", "")


def test_an_error_of_a_run_keeps_its_cause(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug") from KeyError("its cause")

    monkeypatch.setattr(train, "build_module", broken)
    with pytest.raises(RuntimeError, match="a bug") as raised:
        train(*TINY, "data.path=text.txt")
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.fixture
def send(monkeypatch):
    """send(signum, ...) lets the next training step get the signals; the handlers must be the same afterwards."""
    handlers = [signal.getsignal(signum) for signum in SIGNALS]
    original = TrainingModule.training_step

    def send(*signums):
        def step(*arguments):
            monkeypatch.setattr(TrainingModule, "training_step", original)
            for signum in signums:
                signal.raise_signal(signum)
            return original(*arguments)

        monkeypatch.setattr(TrainingModule, "training_step", step)

    yield send
    assert [signal.getsignal(signum) for signum in SIGNALS] == handlers


def test_ctrl_c_writes_a_checkpoint_from_which_the_run_continues(run, folder, send):
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        train(*TINY, "data.path=text.txt", "hydra.run.dir=stopped")
    place = folder / "stopped"
    assert str(raised.value) == f'stopped by Ctrl-C at step 1; continue with train("resume={place}")'
    assert train(f"resume={place}").summary["final_val_loss"] == run.summary["final_val_loss"]


def test_a_second_ctrl_c_does_not_wait_and_leaves_the_process_alive(folder, send):
    send(signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C at step 0; there is no checkpoint yet"):
        train(*TINY, "data.path=text.txt", "hydra.run.dir=at_once")


def test_sigterm_goes_to_the_handler_of_the_process_after_the_checkpoint(folder, send, monkeypatch):
    found = []

    def handler(signum, frame):
        found.append((signum, (folder / "ended" / "checkpoints" / "last.ckpt").is_file()))

    before = signal.signal(signal.SIGTERM, handler)
    try:
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM at step 1; continue with "):
            train(*TINY, "data.path=text.txt", "hydra.run.dir=ended")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [(signal.SIGTERM, True)]
