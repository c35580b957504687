"""The checkpoints of a run: when they are written, and how: atomically, in a thread, and the one before is kept."""

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection

from tril.model.atomic_files import atomic_path
from tril.model.checkpoint import read_state, write_state
from tril.model.runs import BEST, CHECKPOINTS, LAST, PREVIOUS
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule
from tril.model.training.settings import CheckpointConfig


class Stop(Protocol):
    """A request to stop the run, such as by a signal."""

    @property
    def requested(self) -> bool: ...

    def defer(self) -> None:
        """From now on a request waits for the end of the step."""

    def at_once(self) -> None:
        """From now on a request stops the run at once."""

    def finish(self) -> NoReturn:
        """Ends the run with an exception."""
        raise NotImplementedError


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints in a thread, while training goes on; Lightning alone would write to /tmp and move the file.

    Attributes:
        is_best: the next last.ckpt has the lowest validation loss, so best.ckpt becomes a link to it.
    """

    def __init__(self) -> None:
        self.is_best = False
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options=None) -> None:
        """Copies the tensors and returns; waits for the checkpoint before.

        Raises:
            OSError: the checkpoint before could not be written.
        """
        copies: dict[tuple, torch.Tensor] = {}  # one of each memory, so that tied weights stay tied

        def copy(x: torch.Tensor) -> torch.Tensor:
            memory = x.data_ptr(), x.shape, x.stride(), x.dtype
            if memory not in copies or not x.numel():
                copies[memory] = x.detach().to("cpu", copy=True)
            return copies[memory]

        content = apply_to_collection(checkpoint, torch.Tensor, copy)
        self.teardown()  # waits
        self._pending = self._writer.submit(write_and_rotate, Path(path), content, self.is_best)

    def load_checkpoint(self, path: str | Path, map_location=None, weights_only: bool | None = True) -> dict[str, Any]:
        """Verified, and without unpickling code, whatever Lightning's default is."""
        return read_state(path)  # mapped tensors would change with the file

    def teardown(self) -> None:
        """Returns when everything is written; also at the end of a run that fails. Raises OSError if it could not be
        written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


class Checkpoints(Checkpoint):
    """Writes last.ckpt at the end of optimizer steps: after every validation, at intervals, and when the run stops.

    The last step is always validated. Where a validation follows a step, the checkpoint follows the validation, so that
    a resumed run has its results. Lightning calls this callback after all others, so the files hold their complete
    state.

    Args:
        folder: of the run.
        config: the intervals.
        stop: it is asked after every step of all processes.
        files: writes the checkpoints.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig, stop: Stop, files: CheckpointFiles) -> None:
        self.path, self.config, self._stop, self._files = Path(folder) / CHECKPOINTS / LAST, config, stop, files
        self._saved_at = 0.0  # time.monotonic()
        self._step = 0  # that ended last
        self._loops: dict[str, Any] | None = None  # Lightning's counters at its end

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Gives a checkpoint the counters at the end of its step, from which Lightning 2.6 continues in every case.

        Those within a validation are ambiguous: with the ones of a validation outside of trainer.val_check_interval,
        as that of the last step, it makes one more step of a pass that is over.
        """
        if self._loops is not None:
            checkpoint["loops"]["fit_loop"] = self._loops

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._saved_at, self._step = time.monotonic(), trainer.global_step
        self._stop.defer()

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step == self._step:  # no end of an optimizer step
            return
        self._step, loop = trainer.global_step, trainer.fit_loop
        if self._step == trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates, while it still has the state of the loaders
        interval = int(trainer.val_check_batch or 1)
        is_validated = trainer.should_stop or (loop.total_batch_idx + 1) % interval == 0
        self._loops = loop.state_dict() if is_validated else None
        if not is_validated and self._agreed(trainer, self._stop.requested or self._is_due()):
            self._save_and_stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise a checkpoint would lack the state of the loaders
            self._save_and_stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._stop.at_once()

    def _save_and_stop(self, trainer: Trainer) -> None:
        """Writes last.ckpt, and ends the run if one of its processes is to stop."""
        self._saved_at = time.monotonic()
        metrics = Metrics.of(trainer)
        self._files.is_best = metrics.last("val/loss") is not None and metrics.best()["step"] == trainer.global_step
        trainer.save_checkpoint(self.path)
        if self._agreed(trainer, self._stop.requested):
            self._stop.finish()

    @staticmethod
    def _agreed(trainer: Trainer, decision: bool) -> bool:
        """Whether the decision of one process is True; all of them must call it."""
        return trainer.strategy.reduce_boolean_decision(decision, all=False)

    def _is_due(self) -> bool:
        """Whether an interval has passed; the clocks of the processes differ."""
        minutes, steps = self.config.every_minutes, self.config.every_n_steps
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return by_time or (steps is not None and self._step % steps == 0)


def write_and_rotate(path: Path, content: dict[str, Any], is_best: bool) -> None:
    """Writes a checkpoint; a last.ckpt is complete before it replaces the one before, which becomes previous.ckpt.

    There are two complete checkpoints at every moment.
    """
    if path.name != LAST:
        return write_state(path, content)
    with atomic_path(path) as new:
        write_state(new, content)
        if is_best:
            link(new, path.with_name(BEST))
        if path.is_file():
            link(path, path.with_name(PREVIOUS))


def link(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source`, atomically; a copy where the file system has no hard links."""
    with atomic_path(target) as part:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
