"""Programs that the benchmark starts."""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

from tril.scripts.cli.errors import UserError, user_errors

TRAIN = (sys.executable, "-m", "tril.train")
SAMPLE = (sys.executable, "-m", "tril.scripts.sample")


def split_command(command: str) -> list[str]:
    """Splits a command line into words, as a shell does; `python` becomes the current interpreter."""
    program, *rest = shlex.split(command)
    return [sys.executable if program == "python" else program, *rest]


def check_program(key: str, command: str, folder: str | None) -> None:
    """Checks that the program of the command `key` and the folder that it starts in exist.

    Raises:
        ValueError: one of them does not, or the command cannot be split into words.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"vs_dir={folder} is not a folder; give the folder that the command of {key} is typed in")
    try:
        program = split_command(command)[0]
    except ValueError as error:
        raise ValueError(f"{key}={command} is not a command ({error})") from error
    if shutil.which(program) is None and not Path(folder or ".", program).is_file():
        raise ValueError(f"{key}: there is no program {program}; name one that starts without a shell")


def run(name: str, command: Sequence[str], folder: str | Path | None = None) -> tuple[float, str]:
    """Runs a program to its end.

    Args:
        name: what the error message calls it.
        folder: its working directory; None: the current one.

    Returns:
        The seconds that the process took, and its output (stdout and stderr).

    Raises:
        UserError: the program cannot be started, or its exit status is not 0.
    """
    started = time.perf_counter()
    with user_errors():
        done = subprocess.run(
            command, cwd=folder, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, encoding="utf-8", errors="replace"
        )
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise UserError(f"{name} ended with status {done.returncode}: {last_line(done.stdout)}")
    return seconds, done.stdout


def last_line(output: str) -> str:
    """The last line that is not blank."""
    return output.strip().rpartition("\n")[2].strip() or "(no output)"
