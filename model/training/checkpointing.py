"""Checkpoint files of a run: written atomically, in a thread, and the one before is kept."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from tril.model.checkpoint import read_state, write_state
from tril.model.runs import LAST, PREVIOUS


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints atomically, in a thread of its own.

    Training waits for a copy of the tensors only. last.ckpt becomes previous.ckpt when its successor is complete.
    Lightning alone writes to /tmp and moves the file. If that is another file system, moving is copying: a full disk or
    a killed process replaces the earlier checkpoint by a truncated one.
    """

    def __init__(self) -> None:
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options=None) -> None:
        """Copies the tensors and returns; waits for the checkpoint before.

        Raises:
            OSError: the checkpoint before could not be written.
        """
        copies: dict[tuple, torch.Tensor] = {}  # one of each, so that tied weights stay tied

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if key not in copies or not tensor.numel():
                copies[key] = tensor.detach().to("cpu", copy=True)
            return copies[key]

        content = apply_to_collection(checkpoint, torch.Tensor, copied)
        self.submit(lambda: write_and_rotate(Path(path), content))

    def submit(self, task: Callable[[], None]) -> None:
        """Runs `task` in the thread, after what was submitted before."""
        self.wait()
        self._writer = self._writer or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = self._writer.submit(task)

    def wait(self) -> None:
        """Returns when everything is written. Raises OSError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load_checkpoint(self, path: str | Path, map_location=None, weights_only: bool | None = True) -> dict[str, Any]:
        """Verified, and without unpickling code, whatever Lightning's default is."""
        return read_state(path)  # mapped tensors would change with the file

    def teardown(self) -> None:
        """At the end of a run, also of one that fails."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown(wait=True)
        self.wait()


def write_and_rotate(path: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint; a last.ckpt is complete before it replaces the one before, which becomes previous.ckpt.

    There are two complete checkpoints at every moment.
    """
    if path.name != LAST:
        return write_state(path, content)
    new = _temporary(path)
    try:
        write_state(new, content)
        if path.is_file():
            link(path, path.with_name(PREVIOUS))
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def link(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source`, atomically; a copy where the file system has no hard links."""
    part = _temporary(target)
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        shutil.copyfile(source, part)
    os.replace(part, target)


def _temporary(path: Path) -> Path:
    """A name that `remove_leftovers` recognizes."""
    return path.with_name(f".{path.name}-new.{os.getpid()}.part")
