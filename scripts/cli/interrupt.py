"""Ctrl-C while a script still imports ends it with one line and status 130. A script imports this module first."""

import os
import sys
from types import TracebackType


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Prints an exception that nobody caught, as Python does, but for Ctrl-C."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, traceback)
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)


sys.excepthook = show
