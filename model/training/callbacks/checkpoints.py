"""When a run writes its checkpoints, and where it stops."""

import math
import time
from pathlib import Path
from typing import Any, NoReturn, Protocol

from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from tril.model.runs import BEST, CHECKPOINTS, LAST
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.checkpointing import CheckpointFiles, link
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


class Checkpoints(Checkpoint):
    """Writes checkpoints/last.ckpt at the end of optimizer steps; best.ckpt is a link to that of the best validation.

    A checkpoint is written after every validation, at the intervals of the config, and when the run is to stop. The
    last step is always validated. Where a validation follows a step, the checkpoint follows the validation, so that a
    resumed run has its results. Lightning calls this callback after all others, so the files hold their complete state.

    Args:
        folder: of the run.
        config: the intervals.
        stop: it is asked after every step of all processes.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig, stop: Stop) -> None:
        self.folder, self.config, self._stop = Path(folder) / CHECKPOINTS, config, stop
        self._saved_at = 0.0  # time.monotonic()
        self._loops: dict[str, Any] | None = None  # Lightning's counters at the end of the last step

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Gives a checkpoint the counters at the end of its step, from which Lightning 2.6 continues in every case.

        Those within a validation are ambiguous: with the ones of a validation outside of trainer.val_check_interval,
        as that of the last step, it makes one more step of a pass that is over.
        """
        if self._loops is not None:
            checkpoint["loops"]["fit_loop"] = self._loops

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._saved_at = time.monotonic()
        self._stop.defer()

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        if loop._should_accumulate():  # no end of an optimizer step
            return
        last_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.global_step == trainer.max_steps or last_epoch:
            trainer.should_stop = True  # Lightning then validates, while it still has the state of the loaders
        is_validated = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)  # pyright: ignore[reportArgumentType] set by fit
        self._loops = trainer.fit_loop.state_dict() if is_validated else None
        if not is_validated and _any_process(trainer, self._stop.requested or self._is_due(trainer)):  # all take part
            self._save_and_stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise a checkpoint would lack the state of the loaders
            self._save_and_stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._stop.at_once()

    def _save_and_stop(self, trainer: Trainer) -> None:
        """Writes the checkpoints, and ends the run if one of its processes is to stop."""
        self.save(trainer)
        if _any_process(trainer, self._stop.requested):
            self._stop.finish()

    def save(self, trainer: Trainer) -> None:
        """Writes last.ckpt, and links best.ckpt to it if the model was validated in this step and is the best one."""
        self._saved_at = time.monotonic()
        trainer.save_checkpoint(self.folder / LAST)
        metrics = Metrics.of(trainer)
        if not trainer.is_global_zero or not metrics.val or metrics.val[-1]["step"] != trainer.global_step:
            return
        is_finite = math.isfinite(metrics.val[-1]["loss"])
        if is_finite and (metrics.val[-1] == metrics.best() or not (self.folder / BEST).is_file()):
            files = trainer.strategy.checkpoint_io
            assert isinstance(files, CheckpointFiles)
            files.submit(lambda: link(self.folder / LAST, self.folder / BEST))

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether an interval has passed; the clocks of the processes differ."""
        minutes, steps = self.config.every_minutes, self.config.every_n_steps
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return by_time or (steps is not None and trainer.global_step % steps == 0)


def _any_process(trainer: Trainer, decision: bool) -> bool:
    return trainer.strategy.reduce_boolean_decision(decision, all=False) if trainer.world_size > 1 else decision
