"""Ends a run on SIGTERM or Ctrl-C with one line and the status that a shell expects."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class StoppedError(BaseException):
    """A signal stops the run. Not an Exception, so that only the entry point catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        self.status = 128 + signum
        self.step = 0  # optimizer steps of the run so far


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raises StoppedError in the block on SIGTERM and SIGINT. Lightning's handler of SIGTERM calls it too."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise StoppedError(signum)

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
