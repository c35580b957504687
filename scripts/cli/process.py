"""The processes of a run: their ranks, the folder that all of them use, and the signals that end them.

Lightning starts the processes of trainer.devices=N itself; torchrun and Slurm's srun start them before train.py runs.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tril.model.runs import is_resumable

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # of torchrun, Lightning and srun, in Lightning's order
RUN_FOLDER = "TRIL_RUN_FOLDER"  # the variable in which rank 0 tells the processes that Lightning starts its folder
# Slurm sends SIGUSR1 before the time limit, with #SBATCH --signal=USR1@120; Windows has none.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


def process_rank() -> int:
    """The rank of this process in its run; 0 in a run of one process."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def n_started() -> int:
    """The number of processes that torchrun or srun started, which know nothing of each other yet; 1: neither did."""
    return int(os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS", 1))


def quiet_ranks() -> None:
    """Every rank but 0 prints errors only, for the rest of the process."""
    if process_rank() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)


@contextlib.contextmanager
def shared_folder(choose: Callable[[], Path]) -> Iterator[Path]:
    """The run's folder. Rank 0 chooses it for the processes that Lightning starts in the block."""
    if process_rank() > 0 and RUN_FOLDER in os.environ:
        yield Path(os.environ[RUN_FOLDER])
        return
    folder = choose()
    os.environ[RUN_FOLDER] = str(folder.absolute())
    try:
        yield folder
    finally:
        os.environ.pop(RUN_FOLDER, None)


class StoppedError(BaseException):
    """A signal stops the run. Not an Exception, so that only the entry point catches it.

    Attributes:
        status: of the process.
        step: optimizer steps of the run so far.
        folder: of the run; None: it has none yet.
        agreed: every process of the run raises it, after the same step.
    """

    def __init__(self, signum: int, folder: Path | None = None, *, agreed: bool = False) -> None:
        super().__init__()
        self.agreed = agreed
        self.name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        self.status, self.step, self.folder = 128 + signum, 0, folder

    def describe(self, resume: str) -> str:
        """What happened in one line; `resume` is the command that continues the run."""
        resumable = self.folder is not None and is_resumable(self.folder)
        remedy = f"continue with {resume}" if resumable else "there is no checkpoint yet"
        return f"stopped by {self.name} at step {self.step}; {remedy}"


class StopRequest:
    """The first signal that asks a run to stop; a second one does not wait for the end of the step.

    Attributes:
        folder: of the run that it stops; None: it has none yet.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.folder: Path | None = None
        self._deferred = False

    @property
    def requested(self) -> bool:
        """Whether a signal came, which waits for the end of the step."""
        return self.signum is not None

    def defer(self) -> None:
        """From now on a signal waits for the end of the step. Replaces the handlers that Lightning's fit sets."""
        self._deferred = True
        self.install()

    def at_once(self) -> None:
        """From now on a signal stops the run at once, as one that still waits does."""
        self._deferred = False
        if self.requested:
            self.finish()

    def finish(self) -> NoReturn:
        """Ends the run. If another rank received the signal, the run stops as for SIGTERM."""
        signum = signal.SIGTERM if self.signum is None else self.signum
        raise StoppedError(signum, self.folder, agreed=self._deferred)

    def install(self) -> dict[int, Any]:
        """Sets the handlers and returns those of before. Only the main thread may do that."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {signum: signal.signal(signum, self._handle) for signum in SIGNALS}

    def _handle(self, signum: int, frame: object) -> None:
        if self.requested:
            self.at_once()
        self.signum = signum
        if not self._deferred:
            self.finish()
        if signum == signal.SIGINT and process_rank() == 0:
            print("the run stops after this step; Ctrl-C again stops it at once", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM, SIGINT and SIGUSR1 stop the run of the block with a StoppedError."""
    stop = StopRequest()
    before = stop.install()
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
