"""Runs a script's `main` in this process, with the command line, the folder and the output of a separate process."""

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock


def run_main(main: Callable[[], object], *arguments: str, cwd: Path) -> SimpleNamespace:
    """Returns returncode, stdout, stderr, and the environment at the end; a UserWarning is an error."""
    stdout, stderr, code = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO(), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(mock.patch.object(sys, "argv", ["script.py", *arguments]))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_unchanged_logging())
        stack.enter_context(contextlib.redirect_stdout(stdout))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        warnings.simplefilter("error", UserWarning)
        try:
            main()
        except SystemExit as error:
            code = error.code
        environment = dict(os.environ)
    stdout.flush()
    text = stdout.buffer.getvalue().decode()
    return SimpleNamespace(returncode=code, stdout=text, stderr=stderr.getvalue(), environment=environment)


@contextlib.contextmanager
def _unchanged_logging():
    """Hydra configures logging for a whole process."""
    root, level, handlers = logging.root, logging.root.level, logging.root.handlers[:]
    loggers = [logger for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    disabled = [logger.disabled for logger in loggers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        for logger, value in zip(loggers, disabled, strict=True):
            logger.disabled = value
