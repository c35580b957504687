"""Ends a run on SIGTERM or Ctrl-C with one line and the status that a shell expects."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tril.model.runs import CHECKPOINTS, LAST
from tril.scripts.common.ranks import process_rank

REQUEUE = getattr(signal, "SIGUSR1", None)  # Slurm sends it before the time limit, with #SBATCH --signal=USR1@120


class StoppedError(BaseException):
    """A signal stops the run. Not an Exception, so that only the entry point catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        self.status = 128 + signum
        self.step = 0  # optimizer steps of the run so far

    def describe(self, folder: Path, resume: str) -> str:
        """What happened in one line.

        Args:
            folder: of the run.
            resume: the command that continues it.
        """
        resumable = (folder / CHECKPOINTS / LAST).is_file()
        remedy = f"continue with {resume}" if resumable else "there is no checkpoint yet"
        return f"stopped by {self.name} at step {self.step}; {remedy}"


class StopRequest:
    """The first signal that asks a run to stop; a second one does not wait for the end of the step.

    Args:
        ends_process: a second signal ends the process; otherwise it raises a StoppedError.
    """

    def __init__(self, ends_process: bool = True) -> None:
        self.signum: int | None = None
        self._ends_process = ends_process
        self._deferred = False
        self._before: dict[int, Any] = {}

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
        """Ends the run. Without a signal of its own, this process follows another one of the same run."""
        raise StoppedError(signal.SIGTERM if self.signum is None else self.signum)

    def install(self) -> None:
        """Sets the handlers; `restore` sets those of before. Only the main thread may do that."""
        if threading.current_thread() is threading.main_thread():
            requeue = [REQUEUE] if REQUEUE is not None and slurm_job() else []
            for signum in (signal.SIGTERM, signal.SIGINT, *requeue):
                self._before.setdefault(signum, signal.getsignal(signum))
                signal.signal(signum, self._handle)

    def restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def _handle(self, signum: int, frame: object) -> None:
        if self.requested and self._ends_process:
            os._exit(128 + signum)
        if self.requested:
            self.at_once()
        self.signum = signum
        if not self._deferred:
            self.finish()
        if signum == signal.SIGINT and process_rank() == 0:
            print("the run stops after this step; Ctrl-C again stops it at once", file=sys.stderr, flush=True)


def slurm_job() -> str | None:
    """The id of this Slurm job, or of this task of a job array; None outside of Slurm."""
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def requeue() -> str:
    """Asks Slurm to start this job again. Returns what happened, for the last line of the run."""
    command = ["scontrol", "requeue", slurm_job() or ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)} failed: {error}"
    return f"{' '.join(command)} failed: {done.stderr.strip()}" if done.returncode else "Slurm starts the job again"


@contextlib.contextmanager
def stop_on_signals(ends_process: bool = True) -> Iterator[StopRequest]:
    """SIGTERM and SIGINT, and under Slurm SIGUSR1, stop the run of the block with a StoppedError.

    Args:
        ends_process: a second signal ends the process, whatever it does.
    """
    stop = StopRequest(ends_process)
    stop.install()
    try:
        yield stop
    finally:
        stop.restore()
