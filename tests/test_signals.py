"""A run that a signal stops ends with one line and the status that a shell expects."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.runs import TINY, in_process
from tril.model.training.callbacks.samples import Samples
from tril.scripts.common.cli import CONFIGS


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_ends_a_run_with_one_line_and_its_status(tmp_path, text, monkeypatch, signum, name):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(Samples, "on_validation_end", lambda self, trainer, module: signal.raise_signal(signum))
    done = in_process(*TINY, f"data.path={text}", "hydra.run.dir=run", "logger=none", cwd=tmp_path)
    assert done.returncode == 128 + signum
    assert after_preparing(done.stderr) == f"stopped by {name} at step 4; there is no checkpoint yet\n"
    assert not (tmp_path / "run" / "summary.json").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers

    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "last.ckpt").touch()  # of an earlier part of the run
    done = in_process(*TINY, f"data.path={text}", "hydra.run.dir=run", "logger=none", cwd=tmp_path)
    assert (
        after_preparing(done.stderr)
        == f"stopped by {name} at step 4; continue with python train.py resume={tmp_path / 'run'}\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can handle")
def test_the_command_ends_with_143_on_sigterm(tmp_path, text):
    command = [sys.executable, CONFIGS.parent / "train.py", *TINY, f"data.path={text}", "trainer.max_steps=100000"]
    environment = os.environ | {"TRIL_CACHE": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "callbacks.samples=null"], cwd=tmp_path, env=environment, **pipes) as process:
        validations = (line for line in process.stdout if "  validation: " in line)
        next(validations), next(validations)  # the first one has written its checkpoint by then
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    stopped = r"stopped by SIGTERM at step \d+; continue with python train.py resume=\S+\n"
    assert re.fullmatch(stopped, after_preparing(errors)), errors


def after_preparing(errors: str) -> str:
    """stderr without the line about the split, which the first start on a text prints."""
    return re.sub(r"\Avalidation is .+\n", "", errors)
