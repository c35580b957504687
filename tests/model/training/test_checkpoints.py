"""Checkpoints are written whole or not at all, at the ends of optimizer steps, and the one before is kept."""

import threading
from types import SimpleNamespace

import pytest
import torch

from tests.runs import rows, train_typed
from tril.model import checkpoint as checkpoint_module
from tril.model.checkpoint import read_state
from tril.model.training import checkpoints
from tril.model.training.checkpoints import CheckpointFiles

CONTENT = {"tril": {"config": {}, "tokenizer": "", "eot": ""}, "state_dict": {}}


def save(path, step):
    files = CheckpointFiles()
    files.save_checkpoint(CONTENT | {"global_step": step}, path)
    files.teardown()


def steps_of(folder):
    return {path.name: read_state(path)["global_step"] for path in sorted(folder.iterdir())}


def test_the_checkpoint_before_is_kept(tmp_path):
    for step in range(1, 4):
        save(tmp_path / "last.ckpt", step)
    assert steps_of(tmp_path) == {"last.ckpt": 3, "previous.ckpt": 2}
    save(tmp_path / "other.ckpt", 9)
    save(tmp_path / "other.ckpt", 10)
    assert steps_of(tmp_path) == {"last.ckpt": 3, "other.ckpt": 10, "previous.ckpt": 2}


def test_a_failure_half_way_leaves_both_good_files_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    save(path, 1), save(path, 2)
    original = torch.save

    def full_disk(content, file):
        original(content, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(path, 3)
    assert steps_of(tmp_path) == {"last.ckpt": 2, "previous.ckpt": 1}


def test_a_file_system_without_hard_links_gets_copies(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoints.os, "link", no_links)
    save(tmp_path / "last.ckpt", 1), save(tmp_path / "last.ckpt", 2)
    assert steps_of(tmp_path) == {"last.ckpt": 2, "previous.ckpt": 1}


def test_tied_weights_are_written_once(tmp_path):
    table = torch.ones(100, 100)
    files = CheckpointFiles()
    files.save_checkpoint(CONTENT | {"embed": table, "head": table}, tmp_path / "last.ckpt")
    files.teardown()
    assert (tmp_path / "last.ckpt").stat().st_size < 1.5 * table.nbytes


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The tensors of the file are those of the call, and the call returns before the file is written."""
    begin, weights, files = threading.Event(), torch.zeros(3), CheckpointFiles()
    original = checkpoint_module.write_state

    def wait_then_write(path, content):
        assert begin.wait(60)
        original(path, content)

    monkeypatch.setattr(checkpoints, "write_state", wait_then_write)
    files.save_checkpoint(CONTENT | {"global_step": 1, "w": weights}, tmp_path / "last.ckpt")
    weights += 1
    begin.set()
    files.teardown()
    assert read_state(tmp_path / "last.ckpt")["w"].tolist() == [0, 0, 0]


@pytest.fixture
def saved(monkeypatch):
    """The steps at which a run writes a checkpoint, in order."""
    steps = []
    original = CheckpointFiles.save_checkpoint

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        steps.append(checkpoint["global_step"])
        original(self, checkpoint, path)

    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", save_checkpoint)
    return steps


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [4, 8]),
        (["checkpoint.every_n_steps=3"], [3, 4, 6, 8]),
        (["checkpoint.every_n_steps=2"], [2, 4, 6, 8]),
        (["trainer.max_steps=7"], [4, 7]),  # the last step is validated
        (["trainer.accumulate_grad_batches=3", "data.batch_size=2"], [4, 8]),  # the interval of 4 counts steps
        (["trainer.accumulate_grad_batches=3", "trainer.val_check_interval=3", "data.batch_size=2"], [3, 6, 8]),
        (["checkpoint.every_minutes=1.5"], [2, 4, 6, 8]),
    ],
)
def test_when_a_run_writes_checkpoints(configure, saved, monkeypatch, overrides, expected):
    """The clock gives a minute for every look at it: at the start, after every step, and at every checkpoint."""
    minutes = iter(range(0, 10000, 60))
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: float(next(minutes))))
    train_typed(configure("checkpoint.every_minutes=null", *overrides))
    assert saved == expected


def test_the_newest_two_and_the_best_are_kept(configure, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tril.model.training.module.lr_factor", lambda step, *rest: 1.0 if step < 4 else 50.0
    )  # worse from step 5 on
    train_typed(configure("trainer.max_steps=12", "checkpoint.every_n_steps=3"))
    assert steps_of(tmp_path / "run" / "checkpoints") == {"best.ckpt": 4, "last.ckpt": 12, "previous.ckpt": 9}
    assert [row["step"] for row in rows(tmp_path / "run") if row["val/loss"]] == ["4", "8", "12"]


def test_a_longer_run_goes_on_with_the_next_windows(configure, tmp_path):
    """Its last step was no multiple of the validation interval; the checkpoint has the state of the loader."""
    train_typed(configure("trainer.max_steps=7", "checkpoint.every_n_steps=7"))
    last = read_state(tmp_path / "run" / "checkpoints" / "last.ckpt")
    [loader] = last["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert loader == {"consumed": 7 * 4}
