"""Signals that end a run: the first one at the end of the step, with a checkpoint; the second one at once."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tril.model.runs import is_resumable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # Slurm sends the last one before the time limit


class StoppedError(BaseException):
    """A signal stops the run. Not an Exception, so that only the entry point catches it.

    Attributes:
        signum: the signal.
        step: optimizer steps of the run so far.
        folder: of the run; None: it has none yet.
        agreed: every process of the run raises it, after the same step.
    """

    def __init__(self, signum: int, folder: Path | None, *, agreed: bool) -> None:
        super().__init__()
        self.signum, self.step, self.folder, self.agreed = signum, 0, folder, agreed

    def describe(self, resume: str) -> str:
        """What happened in one line; `resume` is the command that continues the run."""
        name = "Ctrl-C" if self.signum == signal.SIGINT else signal.Signals(self.signum).name
        resumable = self.folder is not None and is_resumable(self.folder)
        remedy = f"continue with {resume}" if resumable else "there is no checkpoint yet"
        return f"stopped by {name} at step {self.step}; {remedy}"


class StopRequest:
    """The first signal that asks a run to stop; a second one does not wait for the end of the step.

    Attributes:
        signum: the signal that waits for the end of the step; None: none.
        folder: of the run that it stops; None: it has none yet.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.folder: Path | None = None
        self._deferred = False

    def defer(self) -> None:
        """From now on a signal waits for the end of the step. Replaces the handlers that Lightning's fit sets."""
        self._deferred = True
        self.install()

    def at_once(self) -> None:
        """From now on a signal stops the run at once, as one that still waits does."""
        self._deferred = False
        if self.signum is not None:
            self.finish()

    def finish(self) -> NoReturn:
        """Ends the run. If another rank received the signal, the run stops as for SIGTERM."""
        raise StoppedError(self.signum or signal.SIGTERM, self.folder, agreed=self._deferred)

    def install(self) -> dict[int, Any]:
        """Sets the handlers and returns those of before. Only the main thread may do that."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {signum: signal.signal(signum, self._handle) for signum in SIGNALS}

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum is not None:
            self.at_once()
        self.signum = signum
        if not self._deferred:
            self.finish()
        from lightning.fabric.utilities import rank_zero_only  # Lightning trains, so it is imported

        if signum == signal.SIGINT and rank_zero_only.rank == 0:
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
