"""Checkpoints are written whole or not at all, at the ends of optimizer steps."""

import pytest
import torch

from tests.contract.harness import run
from tests.runs import TINY, train_typed
from tril.model.checkpoint import read_state
from tril.model.training.checkpoints import CheckpointFiles
from tril.model.training.module import TrainingModule

BARE = ["~callbacks.samples", "~callbacks.heads", "~callbacks.causality"]


def save(path, step, **content):
    CheckpointFiles().save_checkpoint({"tril": {}, "state_dict": {}, "global_step": step, **content}, path)


def steps_of(folder):
    return {path.name: read_state(path)["global_step"] for path in sorted(folder.iterdir())}


def test_a_failure_half_way_is_named_and_leaves_the_file_before_and_nothing_else(tmp_path, monkeypatch):
    path, original = tmp_path / "last.ckpt", torch.save
    save(path, 1), save(path, 2)

    def full_disk(content, file):
        original(content, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match=f"cannot write {path.parent}.*No space left.*; free space, or choose another"):
        save(path, 3)
    assert steps_of(tmp_path) == {"last.ckpt": 2}


def test_tied_weights_are_written_once(tmp_path):
    table = torch.zeros(100, 100)
    save(tmp_path / "last.ckpt", 1, embed=table, head=table)
    assert (tmp_path / "last.ckpt").stat().st_size < 1.5 * table.nbytes


def test_when_a_run_writes_checkpoints_and_that_the_last_and_the_best_are_kept(configure, tmp_path, monkeypatch):
    steps, original = [], CheckpointFiles.save_checkpoint

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        steps.append((checkpoint["global_step"], path.stem))
        original(self, checkpoint, path)

    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", save_checkpoint)
    rise = lambda step, *rest: 1.0 if step < 4 else 50.0  # noqa: E731  the loss is worse from step 5 on
    monkeypatch.setattr("tril.model.training.module.lr_factor", rise)
    bare = [*BARE, "data.tokenizer.kind=byte", "checkpoint.every_minutes=null"]
    accumulated = ["trainer.accumulate_grad_batches=3", "data.batch_size=2"]
    train_typed(configure(*bare, *accumulated, "checkpoint.every_n_steps=3"))
    expected = [(3, "last"), (4, "best"), (4, "last"), (6, "last"), (8, "last")]
    assert steps == expected, "steps, not micro-batches; the last step is validated"
    assert steps_of(tmp_path / "run" / "checkpoints") == {"best.ckpt": 4, "last.ckpt": 8}
    [loader] = read_state(tmp_path / "run/checkpoints/last.ckpt")["loops"]["fit_loop"]["state_dict"].values()
    assert loader == [{"consumed": 8 * 3 * 2}]  # a longer run goes on with the next windows
    steps.clear()
    train_typed(configure(*bare, "checkpoint.every_minutes=1e-9", "trainer.max_steps=3", folder="timed"))
    assert [step for step, name in steps if name == "last"] == [1, 2, 3]


def test_a_failed_allocation_ends_the_run_in_one_line(tmp_path, text, monkeypatch):
    step = TrainingModule.training_step

    def training_step(self, batch, batch_idx):
        return step(self, batch, batch_idx) + (torch.empty(10**15, dtype=torch.uint8).sum() if batch_idx == 5 else 0)

    monkeypatch.setattr(TrainingModule, "training_step", training_step)
    done = run("train", *TINY, *BARE, f"data.path={text}", "hydra.run.dir=run", cwd=tmp_path)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert line.startswith("error: out of memory; lower data.batch_size=4, model.context_length=32 or model.dim=32 ")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
