"""The checkpoints of a run, which are written at the ends of optimizer steps, and signals, which end a run there."""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from tril.model.checkpoint import read_state, write_state
from tril.model.formats import shell_command
from tril.model.runs import BEST, CHECKPOINTS, LAST
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule
from tril.model.training.settings import CheckpointConfig, Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Slurm sends the last one before its time limit


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints atomically and verifies them; Lightning alone would write to /tmp and move the file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options=None) -> None:
        """Returns when the content is on the disk. Raises OSError if it cannot be written."""
        write_state(path, checkpoint)

    def load_checkpoint(self, path: str | Path, map_location=None, weights_only: bool | None = True) -> dict[str, Any]:
        """Verified, and without unpickling code, whatever Lightning's default is."""
        return read_state(path)


class Checkpoints(Checkpoint):
    """Writes last.ckpt at the end of optimizer steps: after every validation, at intervals, and after a signal.

    After the validation with the lowest loss so far it writes best.ckpt first: if the run is killed between the two, it
    goes on from the last.ckpt before, and writes both again.

    The last step is always validated. Where a validation follows a step, the checkpoint follows the validation, so that
    a resumed run has its results. Lightning calls this callback after all others, so the files hold their complete
    state.

    The first signal ends the run after the checkpoint of its step. A second one acts at once.

    Args:
        folder: of the run.
        config: the intervals.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig) -> None:
        self.folder, self.config = Path(folder) / CHECKPOINTS, config
        self._saved_at = 0.0  # time.monotonic()
        self._step = 0  # that ended last
        self._loops: dict[str, Any] | None = None  # Lightning's counters at its end
        self._signum: int | None = None  # of the first signal
        self._is_stopped = False  # all processes know that one of them received a signal, and have written a checkpoint
        self._handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}  # before the run

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Gives a checkpoint the counters at the end of its step, from which Lightning 2.6 continues in every case.

        Those within a validation are ambiguous: with the ones of a validation outside of trainer.val_check_interval,
        as that of the last step, it makes one more step of a pass that is over.
        """
        if self._loops is not None:
            checkpoint["loops"]["fit_loop"] = self._loops

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Takes the signals; Lightning restores their handlers at the end of `fit`."""
        self._saved_at, self._step = time.monotonic(), trainer.global_step
        if threading.current_thread() is threading.main_thread():  # no other one may do that
            for signum in SIGNALS:
                signal.signal(signum, self._ask)

    def _ask(self, signum: int, frame: object) -> None:
        self._signum = signum
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        if signum == signal.SIGINT and rank_zero_only.rank == 0:
            print("the run stops after this step; Ctrl-C again stops it at once", file=sys.stderr, flush=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch, batch_idx: int) -> None:
        """Ends the run here, since Lightning logs the metrics of a step after the last callback of the step."""
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._is_stopped:
            signum = self._signum or signal.SIGTERM
            name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
            resume = shell_command("train", f"resume={trainer.default_root_dir}")
            text = f"stopped by {name} at step {trainer.global_step}; continue with {resume}"
            # Lightning kills rank 0 when another rank ends with another status than 0
            raise Stopped(text, 128 + signum if trainer.is_global_zero else 0)

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
        self._is_stopped = trainer.strategy.reduce_boolean_decision(self._signum is not None, all=False)

    def _is_due(self) -> bool:
        """Whether an interval has passed or a signal has come; the processes differ."""
        minutes, steps = self.config.every_minutes, self.config.every_n_steps
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return by_time or (steps is not None and self._step % steps == 0) or self._signum is not None
