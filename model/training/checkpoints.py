"""The checkpoints of a run: when and how they are written."""

import time
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from tril.model.checkpoint import read_state, write_state
from tril.model.runs import BEST, CHECKPOINTS, LAST
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule
from tril.model.training.settings import CheckpointConfig
from tril.model.training.stop import StopAfterStep


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints atomically and verifies them; Lightning alone would write to /tmp and move the file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options=None) -> None:
        """Returns when the content is on the disk. Raises OSError if it cannot be written."""
        write_state(path, checkpoint)

    def load_checkpoint(self, path: str | Path, map_location=None, weights_only: bool | None = True) -> dict[str, Any]:
        """Verified, and without unpickling code, whatever Lightning's default is."""
        return read_state(path)


class Checkpoints(Checkpoint):
    """Writes last.ckpt at the end of optimizer steps: after every validation, at intervals, and when the run stops.

    After the validation with the lowest loss so far it writes best.ckpt first: if the run is killed between the two, it
    goes on from the last.ckpt before, and writes both again.

    The last step is always validated. Where a validation follows a step, the checkpoint follows the validation, so that
    a resumed run has its results. Lightning calls this callback after all others, so the files hold their complete
    state.

    Args:
        folder: of the run.
        config: the intervals.
        stop: ends the run after the checkpoint of a step.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig, stop: StopAfterStep) -> None:
        self.folder, self.config, self.stop = Path(folder) / CHECKPOINTS, config, stop
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

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step == self._step:  # no end of an optimizer step
            return
        self._step, loop = trainer.global_step, trainer.fit_loop
        if self._step == trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates, while it still has the state of the loaders
        interval = int(trainer.val_check_batch or 1)
        is_validated = trainer.should_stop or (loop.total_batch_idx + 1) % interval == 0
        self._loops = loop.state_dict() if is_validated else None
        if not is_validated and trainer.strategy.reduce_boolean_decision(self._is_due(), all=False):
            self._save(trainer, LAST)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise a checkpoint would lack the state of the loaders
            is_best = Metrics.of(trainer).best()["step"] == trainer.global_step
            self._save(trainer, *((BEST, LAST) if is_best else (LAST,)))

    def _save(self, trainer: Trainer, *names: str) -> None:
        self._saved_at = time.monotonic()
        for name in names:
            trainer.save_checkpoint(self.folder / name)
        self.stop.agree(trainer)

    def _is_due(self) -> bool:
        """Whether an interval has passed or a signal has come; the processes differ."""
        minutes, steps = self.config.every_minutes, self.config.every_n_steps
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return by_time or (steps is not None and self._step % steps == 0) or self.stop.signum is not None
