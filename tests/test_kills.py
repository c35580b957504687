"""A run that is killed at random moments and resumed ends with the same files, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")

BARE = ["callbacks.causality=null"]  # the certificate, the half of a run of eight steps, is in the other two

SETTINGS = {
    "default": [],
    "validations and checkpoints after other numbers of accumulated steps": [
        *BARE,
        "data.batch_size=2",
        "trainer.accumulate_grad_batches=3",
        "trainer.val_check_interval=3",
        "checkpoint.every_n_steps=2",
    ],
    "accumulation over the ends of epochs": [
        *BARE,
        "data.batch_size=3",
        "trainer.accumulate_grad_batches=5",
        "trainer.max_steps=30",
        "trainer.val_check_interval=8",
        "checkpoint.every_n_steps=3",
    ],
    "dropout": [*BARE, "model.embd_dropout=0.1", "model.attn_dropout=0.1", "model.resid_dropout=0.1"],
    "AdamW with clipping": [*BARE, "optim=adamw", "optim.schedule.warmup_steps=2", "trainer.gradient_clip_val=0.5"],
    "documents and characters": [*BARE, "data.document_mask=true", "data.tokenizer.kind=char"],
    "every step, several epochs": [*BARE, "data.batch_size=16", "trainer.max_steps=30", "checkpoint.every_n_steps=1"],
    "odd intervals": [
        "trainer.max_steps=11",
        "trainer.val_check_interval=3",
        "trainer.log_every_n_steps=4",
        "checkpoint.every_n_steps=2",
        "model.n_kv_heads=1",
        "model.window=9",
    ],
    "by time": [*BARE, "checkpoint.every_minutes=0.001", "trainer.max_steps=16", "model.pos=learned"],
}
FAST = "validations and checkpoints after other numbers of accumulated steps"
OTHERS = ("default", "accumulation over the ends of epochs", "odd intervals", "by time")


@pytest.mark.parametrize(
    ("name", "n"),
    [
        (FAST, 2),
        *(pytest.param(name, 5, marks=pytest.mark.slow) for name in OTHERS),
        *(pytest.param(name, 5, marks=pytest.mark.long) for name in SETTINGS if name not in OTHERS),
    ],
)
def test_a_killed_run_ends_as_if_it_had_never_been_killed(tmp_path, text, name, n):
    """A process of its own forks the runs: a fork of one with threads, as pytest's workers are, may wait for ever."""
    program = [sys.executable, "-m", "tests.kills", str(tmp_path), text, str(n), name, *SETTINGS[name]]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
