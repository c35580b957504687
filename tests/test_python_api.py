"""`from tril import train; train("model=nano")`: the run of the command, in a process that goes on."""

import csv
import gc
import inspect
import json
import logging
import random
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from tests.conftest import run_python
from tests.runs import TINY, in_process
from tril import train
from tril.model.runs import relocate
from tril.model.training.module import TrainingModule
from tril.scripts.common.cli import CONFIGS, UserError, plain
from tril.scripts.common.trained_run import TrainedRun

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


def test_a_call_trains_the_run_of_the_command(run, folder):
    done = in_process(*TINY, "data.path=text.txt", "hydra.run.dir=command", cwd=folder)
    assert done.returncode == 0, done.stderr
    typed = TrainedRun(folder / "command")
    called, expected = (
        torch.load(place / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for place in (run.folder, typed.folder)
    )
    assert called.keys() == expected.keys() and all(torch.equal(called[name], expected[name]) for name in expected)
    assert relocate(plain(run.config), str(run.folder), str(typed.folder)) == plain(typed.config)


def test_the_run_gives_the_content_of_its_files(run, folder):
    assert run.folder.is_absolute() and run.folder.parents[2] == folder and run.folder.parents[1].name == "outputs"
    assert run.summary == json.loads((run.folder / "summary.json").read_text()) and run.summary["steps"] == 8
    assert run.config == yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (run.config.model.dim, run.config.output_dir) == (32, str(run.folder))
    with (run.folder / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert [{key: str(value) for key, value in row.items()} for row in run.metrics] == rows
    assert [row["step"] for row in run.metrics if "val/loss" in row] == [4, 8]
    assert run.metrics[-1].get("val/loss", run.summary["final_val_loss"]) == run.summary["final_val_loss"]


def test_the_run_loads_its_best_model(run):
    weights = torch.load(run.folder / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    lm = run.load()
    assert not lm.model.training
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in lm.model.state_dict().items())
    assert isinstance(lm.generate("line", max_new_tokens=3), str)


def test_a_saved_text_is_no_interpolation(tmp_path):
    (tmp_path / "config.yaml").write_text("a: ${oc.env:HOME}\nb: [1]\n")
    config = TrainedRun(tmp_path).config
    assert config.a == "${oc.env:HOME}" and config.b == [1]
    with pytest.raises(Exception, match="read-only"):
        config.b = 2


def test_the_module_is_the_function_and_the_script():
    assert [str(parameter) for parameter in inspect.signature(train).parameters.values()] == ["*overrides: str"]
    assert callable(train.main) and list(inspect.signature(train.train).parameters) == ["cfg", "stop", "one_process"]


def test_a_second_run_in_a_process_that_keeps_its_state(run, monkeypatch):
    """The state is not that of a new process, and the run is the same to the bit."""
    arguments, logger = ["notebook", "-m"], logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(logger, "level", logging.INFO)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    torch.set_float32_matmul_precision("medium")
    warnings.simplefilter("default", ImportWarning)  # before the filters of the first run
    gc.disable()
    try:
        with initialize_config_dir(str(CONFIGS), job_name="program", version_base="1.2"):
            program = compose("sample", return_hydra_config=True)
            HydraConfig.instance().set_config(program)
            before = state_of_process()
            again = train(*TINY, "data.path=text.txt")
            after = state_of_process()
            assert HydraConfig.get().job.name == "program"
            assert compose("sample").n == 1  # the program goes on with its configs
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
    "overrides",
    [
        ["model=nono"],
        ["model.n_hedas=3"],
        ["model.n_heads=3"],
        ["model.n_heads=1,2"],
        ["model.n_heads"],
        ["data.path=my notes/*.md"],
        ["resume=nowhere"],
        ["hydra.run.dir=text.txt/run"],
        ["+model.heads=3"],
    ],
    ids=" ".join,
)
def test_a_wrong_setting_is_the_line_of_the_command(overrides, folder, capfd):
    places = set(folder.glob("outputs/*/*"))
    with pytest.raises(UserError) as raised:
        train(*TINY, *overrides)
    assert capfd.readouterr() == ("", "")
    done = in_process(*TINY, *overrides, cwd=folder)
    assert (done.returncode, done.stderr) == (2, f"error: {raised.value}\n")
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert set(folder.glob("outputs/*/*")) == places


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["-m", "seed=0,1"],
            "-m starts a grid, which has a process for each run; start it in a terminal: tril train -m",
        ),
        (["--help"], "--help is an option of the command line; settings are written key=value"),
        ([{"seed": 1}], "{'seed': 1} is dict; settings are strings, such as \"trainer.max_steps=100\""),
        (["foo.bar.baz=1"], "there is no setting foo; see tril train --help"),
        (
            ["trainer=ddp"],
            "trainer.strategy=ddp with trainer.devices=auto starts processes; use tril train in a terminal",
        ),
        (
            ["trainer.devices=2"],
            "trainer.strategy=auto with trainer.devices=2 starts processes; use tril train in a term",
        ),
    ],
)
def test_what_only_the_command_can_do_is_refused(overrides, message):
    with pytest.raises(UserError) as raised:
        train(*overrides)
    assert str(raised.value).startswith(message)


def test_an_error_of_a_run_keeps_its_cause(monkeypatch):
    def broken(*_):
        raise RuntimeError("a bug") from KeyError("its cause")

    monkeypatch.setattr(train, "build_parts", broken)
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


def test_importing_the_function_does_not_import_torch(folder):
    code = "import sys; from tril import train; print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    done: subprocess.CompletedProcess = run_python("-c", code, cwd=folder)
    assert done.stdout == "[]\n", done.stderr
