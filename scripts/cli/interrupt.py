"""Ctrl-C while a program still imports ends it with one line and status 130: `import` could swallow an exception.

A script imports this module first. Only `begin` changes the handler, so a caller of `train` keeps its own.
"""

import os
import signal
import sys


def end_program(signum: int, frame: object) -> None:
    """The handler of Ctrl-C during imports, which leave nothing to clean up."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signum)


def begin() -> None:
    """From now on, Ctrl-C ends the program."""
    signal.signal(signal.SIGINT, end_program)


def end() -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt again; without `begin`, nothing changes."""
    if signal.getsignal(signal.SIGINT) is end_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)
