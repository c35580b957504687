"""Signals that end a run: the first one after the step in progress, with a checkpoint; a second one at once."""

import signal
import sys
import threading

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Slurm sends the last one before its time limit


class Stopped(SystemExit):
    """A signal ended the run after a step, whose checkpoint is last.ckpt; the exit status is 128 + the signal.

    In ranks other than 0 the status is 0, since Lightning kills rank 0 when another rank ends with another status.
    """

    def __init__(self, signum: int, trainer: Trainer) -> None:
        super().__init__(128 + signum if trainer.is_global_zero else 0)
        self.signum, self.step = signum, trainer.global_step

    def describe(self, resume: str) -> str:
        """One line; `resume` is the command that continues the run."""
        name = "Ctrl-C" if self.signum == signal.SIGINT else signal.Signals(self.signum).name
        return f"stopped by {name} at step {self.step}; continue with {resume}"


class StopAfterStep(Callback):
    """The first signal ends the run after a step, once `Checkpoints` has written it. A second one acts at once."""

    def __init__(self) -> None:
        self.signum: int | None = None  # of the first signal
        self._is_agreed = False  # all processes of the run know of it
        self._before = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replaces the handlers of this process; Lightning restores them at the end of `fit`."""
        if threading.current_thread() is threading.main_thread():  # no other one may do that
            for signum in SIGNALS:
                signal.signal(signum, self._ask)

    def _ask(self, signum: int, frame: object) -> None:
        self.signum = signum
        for each, handler in self._before.items():
            signal.signal(each, handler)
        if signum == signal.SIGINT and rank_zero_only.rank == 0:
            print("the run stops after this step; Ctrl-C again stops it at once", file=sys.stderr, flush=True)

    def agree(self, trainer: Trainer) -> None:
        """Finds out whether a process of the run received a signal; all of them call it after a checkpoint."""
        self._is_agreed = trainer.strategy.reduce_boolean_decision(self.signum is not None, all=False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch, batch_idx: int) -> None:
        """Ends the run here, since Lightning logs the metrics of a step after the last callback of the step."""
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_agreed:
            raise Stopped(self.signum or signal.SIGTERM, trainer)
