"""One run of a sweep: an ordinary run in a separate process and folder.

A crash then ends one run and not the sweep, and no run sees memory, compiled code or random numbers of another one.
"""

import contextlib
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TextIO

from tril.model.atomic_files import write_json
from tril.model.runs import CHECKPOINTS, FAILURE, state_of
from tril.scripts.cli.formats import clock
from tril.scripts.experiments.sweep import Run

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM)  # exit status of a run that a signal stopped
LOCK_POLL_SECONDS = 0.5
TYPED = re.compile(r"[+~]*(allow_targets=|(callbacks|logger|data)\.)")  # may not come from a run's folder alone
PROGRAM = (
    sys.executable,
    "-P",
    "-m",
    "tril.train",
)  # -P: modules in the working directory do not shadow installed ones


def train(folder: Path, overrides: list[str], name: str, program: Sequence[str] = PROGRAM) -> float:
    """Runs the training process to its end, from the last checkpoint if there is one.

    Args:
        program: the command that trains, before its overrides.

    Returns:
        Its validation loss; NaN if it failed or was stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, name) as lock:
        return train_locked(folder, overrides, name, lock, program)


def train_locked(
    folder: Path, overrides: list[str], name: str, lock: TextIO, program: Sequence[str] = PROGRAM
) -> float:
    """The same for a folder that exists and that this process has locked."""
    if state_of(folder) == "finished":
        return report_finished(folder, name, "was finished before")
    (folder / FAILURE).unlink(missing_ok=True)
    if (folder / CHECKPOINTS / "last.ckpt").is_file():
        typed = [text for text in overrides if TYPED.match(text)]
        arguments = [f"resume={folder}", *typed]
    else:  # without a checkpoint, nothing in the folder is of use
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        arguments = [*overrides, f"hydra.run.dir={folder}"]
    print(f"start   {name}", flush=True)
    log = folder / "log.txt"
    status = spawn([*program, *arguments], log, lock)
    if state_of(folder) == "finished":  # also if it diverged, which ends with a status of its own
        return report_finished(folder, name, "finished")
    if status in STOPPED:
        print(f"stopped {name} by a signal; start the same command again to continue", flush=True)
        return math.nan
    message = last_line(log) or f"ended with status {status}"
    write_json(folder / FAILURE, {"status": status, "message": message})
    print(f"FAILED  {name}: {message} (status {status}, {log})", flush=True)
    return math.nan


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[TextIO]:
    """Locks the run's folder against other processes, such as the training process of a sweep that was killed."""
    with lock_file(folder).open("w") as lock:
        if not try_lock(lock):
            print(f"wait    {name}: another process is training it", flush=True)
            while not try_lock(lock):
                time.sleep(LOCK_POLL_SECONDS)
        yield lock


@contextlib.contextmanager
def locked_if_free(folder: Path) -> Iterator[TextIO | None]:
    """Locks the run's folder; None if another process holds the lock."""
    with lock_file(folder).open("w") as lock:
        yield lock if try_lock(lock) else None


def try_lock(file: IO) -> bool:
    """Locks the file until all its descriptors are closed; False if another process holds the lock.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def spawn(arguments: list[str], log: Path, lock: TextIO) -> int:
    """Runs a process with its output in `log` and returns its exit status.

    On POSIX the process inherits the lock, so that it holds the lock as long as it lives, even if the sweep is killed.
    """

    def stop(signum, frame):
        raise SystemExit(128 + signum)

    inherited = () if sys.platform == "win32" else (lock.fileno(),)
    previous = signal.signal(signal.SIGTERM, stop)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=inherited
        )
        try:
            return process.wait()
        except BaseException:  # the end of the sweep ends its run
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)


def report_finished(folder: Path, name: str, how: str) -> float:
    """Prints the results of a finished run and returns its validation loss."""
    summary = Run(folder, 0).summary
    loss, bpb = summary["final_val_loss"], summary["final_val_bpb"]
    figures = f"{loss:.4f} nats per token, {bpb:.4f} bits per byte, {clock(summary['seconds'])}"
    print(f"done    {name} {how}: {figures}", flush=True)
    return loss


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
