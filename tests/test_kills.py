"""A run that is killed at random moments and resumed ends with the same files, to the bit."""

import json
import os
import random
import shutil
import signal
import time

import pytest

from tests import kills
from tests.runs import TINY

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")

SETTINGS = {
    "default": [],
    "accumulation divides neither validation nor epoch": [
        "data.batch_size=2",
        "trainer.accumulate_grad_batches=3",
        "trainer.val_check_interval=4",
        "checkpoint.every_n_steps=2",
    ],
    "accumulation over the ends of epochs": [
        "data.batch_size=3",
        "trainer.accumulate_grad_batches=5",
        "trainer.max_steps=30",
        "trainer.val_check_interval=37",
        "checkpoint.every_n_steps=3",
    ],
    "dropout": ["model.embd_dropout=0.1", "model.attn_dropout=0.1", "model.resid_dropout=0.1"],
    "AdamW with clipping": ["optim=adamw", "optim.schedule.warmup_steps=2", "trainer.gradient_clip_val=0.5"],
    "documents and characters": ["data.document_mask=true", "data.tokenizer.kind=char"],
    "every step, several epochs": ["data.batch_size=16", "trainer.max_steps=30", "checkpoint.every_n_steps=1"],
    "odd intervals": [
        "trainer.max_steps=11",
        "trainer.val_check_interval=3",
        "trainer.log_every_n_steps=4",
        "checkpoint.every_n_steps=2",
        "model.n_kv_heads=1",
        "model.window=9",
    ],
    "by time": ["checkpoint.every_minutes=0.001", "trainer.max_steps=16", "model.pos=learned"],
}
FAST = "accumulation divides neither validation nor epoch"


@pytest.mark.parametrize(
    ("name", "n"), [(FAST, 2), *(pytest.param(name, 5, marks=pytest.mark.slow) for name in SETTINGS)]
)
def test_a_killed_run_ends_as_if_it_had_never_been_killed(tmp_path, text, name, n):
    """Half of the kills are at random times, the others within random calls of the functions that write or compute."""
    overrides = [*TINY, f"data.path={text}", *SETTINGS[name]]
    chance = random.Random(name)
    whole, killed, counts = tmp_path / "whole", tmp_path / "killed", tmp_path / "counts.json"
    with kills.in_folder(tmp_path):
        started = time.monotonic()
        assert kills.run([*overrides, "data.cache_dir=cache1"], whole, kills.count_calls(counts)) == 0, log(whole)
        seconds = time.monotonic() - started
        points = [(point, calls) for point, calls in json.loads(counts.read_text()).items()]
        n_kills, attempt = 0, 0
        while n_kills < n:
            if attempt % 2:
                end = kills.kill_after(chance.uniform(0, seconds))
            else:
                point, calls = chance.choice(points)
                end = kills.kill_within(point, chance.randint(1, calls), seed=attempt)
            status = kills.run([*overrides, "data.cache_dir=cache2"], killed, end)
            assert status in (0, -signal.SIGKILL), log(killed)
            n_kills += status != 0
            attempt += 1
            if status == 0 and n_kills < n:  # it ended before the moment of the kill
                shutil.rmtree(killed)
        if status != 0:
            assert kills.run([*overrides, "data.cache_dir=cache2"], killed) == 0, log(killed)
        expected, found = kills.outcome(whole), kills.outcome(killed)
    assert kills.differences(found, expected) == []


def log(folder):
    return (folder.parent / f"{folder.name}.log").read_text()
