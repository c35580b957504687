"""A run that a signal stops ends with one line and the status that a shell expects."""

import re
import signal
import sys

import pytest
import torch

from tests.conftest import run_python
from tests.runs import TINY, in_process
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.callbacks.output import Samples
from tril.model.training.module import TrainingModule
from tril.model.training.optim import MuonAdamW

SIGNALS = pytest.mark.parametrize(("signum", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
WAITS = "the run stops after this step; Ctrl-C again stops it at once\n"


@pytest.fixture
def send(tmp_path, text, monkeypatch):
    """send(signum, owner, method, *overrides) runs train.py, which gets the signal when it first calls the method."""

    def send(signum, owner, method, *overrides):
        original = getattr(owner, method)

        def first_call(*args, **options):
            monkeypatch.setattr(owner, method, original)
            signal.raise_signal(signum)
            return original(*args, **options)

        monkeypatch.setattr(owner, method, first_call)
        done = in_process(*TINY, f"data.path={text}", "hydra.run.dir=run", *overrides, cwd=tmp_path)
        return done.returncode, after_preparing(done.stderr)

    return send


@SIGNALS
def test_a_signal_before_the_first_step_stops_at_once(send, tmp_path, signum, name):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    status, errors = send(signum, CausalityCheck, "on_fit_start")
    assert (status, errors) == (128 + signum, f"stopped by {name} at step 0; there is no checkpoint yet\n")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


@SIGNALS
@pytest.mark.parametrize(
    ("owner", "method", "overrides", "step"),
    [
        (MuonAdamW, "step", [], 1),
        (TrainingModule, "training_step", ["data.batch_size=2", "trainer.accumulate_grad_batches=3"], 1),
        (TrainingModule, "validation_step", [], 4),
        (Samples, "on_validation_end", [], 4),
        (TrainingModule, "training_step", ["trainer.val_check_interval=1"], 1),  # with the validation
    ],
)
def test_a_signal_ends_the_step_and_writes_a_checkpoint(send, tmp_path, signum, name, owner, method, overrides, step):
    status, errors = send(signum, owner, method, *overrides)
    stopped = f"stopped by {name} at step {step}; continue with python train.py resume={tmp_path / 'run'}\n"
    assert (status, errors) == (128 + signum, (WAITS if signum == signal.SIGINT else "") + stopped)
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == step
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can handle")
def test_a_second_signal_leaves_at_once(tmp_path, text):
    """The step never ends: it waits for a second signal, and then for ever."""
    program = (
        "import signal, sys, time\n"
        "from tril import train\n"
        "from tril.model.training.module import TrainingModule\n"
        "def endless(self, batch, batch_idx):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    time.sleep(100)\n"
        "TrainingModule.training_step = endless\n"
        "train.main()\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = run_python(tmp_path / "program.py", *TINY, f"data.path={text}", cwd=tmp_path, TRIL_CACHE=str(tmp_path / "c"))
    assert done.returncode == 130 and done.stdout.endswith("still here\n"), done.stderr
    assert after_preparing(done.stderr) == WAITS + "stopped by Ctrl-C at step 0; there is no checkpoint yet\n"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Slurm runs on Unix")
def test_the_signal_before_a_time_limit_of_slurm_writes_a_checkpoint(send, tmp_path):
    status, errors = send(signal.SIGUSR1, TrainingModule, "training_step")
    stopped = f"stopped by SIGUSR1 at step 1; continue with python train.py resume={tmp_path / 'run'}\n"
    assert (status, errors) == (128 + signal.SIGUSR1, stopped)


def after_preparing(errors: str) -> str:
    """stderr without the line about the split, which the first start on a text prints."""
    return re.sub(r"\Avalidation is .+\n", "", errors)
