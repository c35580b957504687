"""Entry points called in this process, which saves the seconds that a new process takes to start."""

import contextlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig


def call(
    main: Callable[[], object], *arguments: str | Path, cwd: Path, strict: bool = False, **environment: str
) -> SimpleNamespace:
    """`python SCRIPT ARGUMENTS` in the folder `cwd`, for the `main` of a script.

    Args:
        strict: a UserWarning is an error.
        environment: variables to set.

    Returns:
        returncode, stdout, stderr, and the environment at the end.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with (
        mock.patch.object(sys, "argv", ["script.py", *map(str, arguments)]),
        mock.patch.dict(os.environ, environment),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
        warnings.catch_warnings(),
        unchanged_logging(),
    ):
        if strict:
            warnings.simplefilter("error", UserWarning)
        GlobalHydra.instance().clear()
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None
        final = dict(os.environ)
    for stream in streams:
        stream.flush()
    stdout, stderr = (stream.buffer.getvalue().decode("utf-8") for stream in streams)
    return SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr, environment=final)


@contextlib.contextmanager
def unchanged_logging() -> Iterator[None]:
    """Hydra configures logging for a whole process."""
    loggers = [logging.root, *(each for each in logging.root.manager.loggerDict.values() if hasattr(each, "handlers"))]
    before = [(logger, logger.level, logger.handlers[:], logger.disabled) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, handlers, disabled in before:
            logger.setLevel(level)
            logger.handlers[:], logger.disabled = handlers, disabled
