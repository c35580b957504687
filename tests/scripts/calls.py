"""Calls entry points in this process and returns exit status and output, which saves the start of a process."""

import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig


def call(main, *arguments: str | Path, cwd: Path, **environment: str) -> CompletedProcess:
    """`python SCRIPT ARGUMENTS` in the folder `cwd`, for the `main` of a script."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with (
        mock.patch.object(sys, "argv", ["script.py", *map(str, arguments)]),
        mock.patch.dict(os.environ, environment),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
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
    return CompletedProcess([], status, *map(_text, streams))


def _text(stream: Any) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode("utf-8")
