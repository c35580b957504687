"""Checkpoints are written whole or not at all."""

import shutil
from pathlib import Path

import pytest
import torch

from tril import train as train_script
from tril.model.training.checkpointing import WholeFiles


def test_a_failure_half_way_leaves_the_last_good_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    WholeFiles().save_checkpoint({"step": 1}, path)
    save = torch.save

    def full_disk(content, file):
        save(content, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        WholeFiles().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_moved_from_another_file_system(tmp_path, monkeypatch):
    def half(source, target, *rest, **options):
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(28, "No space left on device")

    path = tmp_path / "last.ckpt"
    monkeypatch.setattr(shutil, "move", half)
    WholeFiles().save_checkpoint({"step": 1}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_a_run_writes_that_way(configure, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        WholeFiles, "save_checkpoint", lambda self, checkpoint, path, storage_options=None: seen.append(str(path))
    )
    train_script.train(configure("trainer.max_steps=4"))
    assert set(seen) == {str(tmp_path / "run" / "checkpoints" / name) for name in ("last.ckpt", "best.ckpt")}
