"""Checkpoints are written whole or not at all, at the ends of optimizer steps, and the one before is kept."""

import threading

import pytest
import torch

from tests.runs import TINY, in_process, train_typed
from tril.model import checkpoint as checkpoint_module
from tril.model.checkpoint import read_state
from tril.model.training import checkpoints
from tril.model.training.checkpoints import CheckpointFiles
from tril.model.training.module import TrainingModule

CONTENT = {"tril": {"config": {}, "tokenizer": "", "eot": ""}, "state_dict": {}}
BARE = ["~callbacks.samples", "~callbacks.heads", "~callbacks.causality"]


def save(path, step, **content):
    files = CheckpointFiles()
    files.save_checkpoint(CONTENT | {"global_step": step, **content}, path)
    files.teardown()


def steps_of(folder):
    return {path.name: read_state(path)["global_step"] for path in sorted(folder.iterdir())}


def test_the_checkpoint_before_is_kept_also_by_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoints.os, "link", no_links)
    for step in range(1, 4):
        save(tmp_path / "last.ckpt", step)
        save(tmp_path / "other.ckpt", 10 * step)
    assert steps_of(tmp_path) == {"last.ckpt": 3, "other.ckpt": 30, "previous.ckpt": 2}


def test_a_failure_half_way_is_named_and_leaves_both_good_files_and_nothing_else(tmp_path, monkeypatch):
    path, original = tmp_path / "last.ckpt", torch.save
    save(path, 1), save(path, 2)

    def full_disk(content, file):
        original(content, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match=f"cannot write {path.parent}.*No space left.*; free space, or choose another"):
        save(path, 3)
    assert steps_of(tmp_path) == {"last.ckpt": 2, "previous.ckpt": 1}


def test_training_goes_on_while_a_checkpoint_is_written_and_tied_weights_are_written_once(tmp_path, monkeypatch):
    """The tensors of the file are those of the call, and the call returns before the file is written."""
    begin, table, files = threading.Event(), torch.zeros(100, 100), CheckpointFiles()
    original = checkpoint_module.write_state

    def wait_then_write(path, content):
        assert begin.wait(60)
        original(path, content)

    monkeypatch.setattr(checkpoints, "write_state", wait_then_write)
    files.save_checkpoint(CONTENT | {"global_step": 1, "embed": table, "head": table}, tmp_path / "last.ckpt")
    table += 1
    begin.set()
    files.teardown()
    assert not read_state(tmp_path / "last.ckpt")["head"].any()
    assert (tmp_path / "last.ckpt").stat().st_size < 1.5 * table.nbytes


def test_when_a_run_writes_checkpoints_and_that_the_newest_two_and_the_best_are_kept(configure, tmp_path, monkeypatch):
    steps, original = [], CheckpointFiles.save_checkpoint

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        steps.append(checkpoint["global_step"])
        original(self, checkpoint, path)

    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", save_checkpoint)
    rise = lambda step, *rest: 1.0 if step < 4 else 50.0  # noqa: E731  the loss is worse from step 5 on
    monkeypatch.setattr("tril.model.training.module.lr_factor", rise)
    bare = [*BARE, "data.tokenizer.kind=byte", "checkpoint.every_minutes=null"]
    accumulated = ["trainer.accumulate_grad_batches=3", "data.batch_size=2"]
    train_typed(configure(*bare, *accumulated, "checkpoint.every_n_steps=3"))
    assert steps == [3, 4, 6, 8], "steps, not micro-batches; the last step is validated"
    assert steps_of(tmp_path / "run" / "checkpoints") == {"best.ckpt": 4, "last.ckpt": 8, "previous.ckpt": 6}
    [loader] = read_state(tmp_path / "run/checkpoints/last.ckpt")["loops"]["fit_loop"]["state_dict"].values()
    assert loader == [{"consumed": 8 * 3 * 2}]  # a longer run goes on with the next windows
    steps.clear()
    train_typed(configure(*bare, "checkpoint.every_minutes=1e-9", "trainer.max_steps=3", folder="timed"))
    assert steps == [1, 2, 3]


def test_a_failed_allocation_ends_the_run_in_one_line(tmp_path, text, monkeypatch):
    step = TrainingModule.training_step

    def training_step(self, batch, batch_idx):
        return step(self, batch, batch_idx) + (torch.empty(10**15, dtype=torch.uint8).sum() if batch_idx == 5 else 0)

    monkeypatch.setattr(TrainingModule, "training_step", training_step)
    done = in_process(*TINY, *BARE, f"data.path={text}", "hydra.run.dir=run", cwd=tmp_path)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert line.startswith("error: out of memory; lower data.batch_size=4, model.context_length=32 or model.dim=32 ")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
