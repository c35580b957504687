"""experiment=finetune: stopping early, and its resumption."""

import json
import re

import numpy as np
import pytest
import torch

from tests.conftest import assert_refused, tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tests.runs import in_process, rows
from tril.model.checkpoint import read_state, save
from tril.model.generation.language_model import LanguageModel
from tril.model.runs import find_checkpoint

RUN = [
    "experiment=finetune",
    "init_from=source.ckpt",
    "data=files",
    "data.batch_size=4",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "callbacks.samples.max_new_tokens=4",
    "hydra.run.dir=run",
]


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=264, context_length=32, n_kv_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.3
    path = tmp_path / "source.ckpt"
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    return path


@pytest.fixture
def small_text(tmp_path):
    """Random digits to train on, and letters to validate on: the validation loss rises soon."""
    random = np.random.default_rng(0)
    (tmp_path / "train.txt").write_text("".join(map(str, random.integers(0, 10, 400))))
    (tmp_path / "val.txt").write_text("".join(map(chr, random.integers(97, 123, 200))))
    return [f"data.path={tmp_path / 'train.txt'}", f"data.val_path={tmp_path / 'val.txt'}"]


STOPPING = ["optim.lr=0.02", "trainer.val_check_interval=3", "callbacks.early_stop.patience=3"]
STOPPING += ["optim.schedule.warmup_steps=2"]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_it_stops_early_says_why_and_keeps_the_best(tmp_path, source, small_text):
    done = in_process(*RUN, *small_text, *STOPPING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, val = (
        tmp_path / "run",
        [(int(row["step"]), float(row["val/loss"])) for row in rows(tmp_path / "run") if row["val/loss"]],
    )
    summary = summary_of(run)
    best = min(val, key=lambda row: row[1])
    assert [step for step, _ in val] == [3 * (i + 1) for i in range(len(val))] and len(val) < 40  # each once
    assert val[-4] == best  # three validations without a lower loss
    assert (summary["steps"], summary["best_step"]) == (val[-1][0], best[0])
    reason = f"at step {val[-1][0]} of 400 by callbacks.early_stop.patience"
    assert summary["stopped_early"].startswith(reason)
    assert re.search(rf"\n  stopped +{re.escape(reason)}", done.stdout)
    steps = {name: read_state(run / "checkpoints" / f"{name}.ckpt")["global_step"] for name in ("last", "best")}
    assert steps == {"last": val[-1][0], "best": best[0]}
    assert find_checkpoint(run).name == "best.ckpt"  # what is sampled
    certificate = json.loads((run / "causality.json").read_text())
    assert certificate["certified_at_step"] == val[-1][0]
    # A resumed run has no step left and changes nothing; with more patience it goes on.
    before, end = files(run), f"has stopped at step {val[-1][0]} by callbacks.early_stop.patience"
    again = in_process("resume=run", cwd=tmp_path)
    assert again.returncode == 0 and f"{end}; it is unchanged" in again.stdout, again.stderr
    other = in_process("resume=run", "optim.lr=0.5", cwd=tmp_path)
    assert_refused(other, f"run {end} without optim.lr; raise callbacks.early_stop.patience to continue it")
    assert files(run) == before
    more = in_process("resume=run", "callbacks.early_stop.patience=5", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    later = summary_of(run)
    assert later["steps"] > val[-1][0] and later["stopped_early"].endswith("by callbacks.early_stop.patience")


@pytest.mark.slow
def test_a_run_that_improves_makes_all_steps(tmp_path, source, text):
    done = in_process(*RUN, f"data.path={text}", "trainer.max_steps=8", *STOPPING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["stopped_early"] is None and summary["steps"] == 8


def test_no_patience_is_refused(tmp_path, source, small_text):
    done = in_process(*RUN, *small_text, "callbacks.early_stop.patience=0", cwd=tmp_path)
    assert_refused(done, "callbacks.early_stop.patience=0 must be greater than or equal to 1")
