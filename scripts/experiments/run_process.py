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
from typing import TextIO

from tril.model.atomic_files import write_json
from tril.model.formats import clock
from tril.model.runs import FAILURE, is_resumable, state_of
from tril.scripts.experiments.sweep import Run

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM)  # exit status of a run that a signal stopped
ENDED = ("finished", "failed")
LOCK_POLL_SECONDS = 0.5
GIVEN = re.compile(r"[+~]*(logger=|(callbacks|logger)\.)")  # a `_target_` is not saved with a run
# -P: modules in the working directory do not shadow installed ones
PROGRAM = (sys.executable, "-P", "-m", "tril.train")


def train(folder: Path, overrides: Sequence[str], name: str) -> float:
    """Runs the training process to its end, from the last checkpoint if there is one.

    Returns:
        Its validation loss; NaN if it failed or was stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waits = False
    while True:
        with locked(folder) as lock:
            if lock is not None:
                return train_locked(folder, overrides, name, lock)
        if not waits:
            print(f"wait    {name}: another process is training it", flush=True)
        waits = True
        time.sleep(LOCK_POLL_SECONDS)


def train_locked(folder: Path, overrides: Sequence[str], name: str, lock: TextIO) -> float:
    """The same for a folder that exists and that this process has locked."""
    if state_of(folder) == "finished":
        return report_finished(folder, name, "was finished before")
    (folder / FAILURE).unlink(missing_ok=True)
    if is_resumable(folder):
        arguments = [f"resume={folder}", *(text for text in overrides if GIVEN.match(text))]
    else:  # without a checkpoint, nothing in the folder is of use
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        arguments = [*overrides, f"hydra.run.dir={folder}"]
    print(f"start   {name}", flush=True)
    log = folder / "log.txt"
    status = spawn([*PROGRAM, *arguments], log, lock)
    if state_of(folder) == "finished":  # also if it diverged, which ends with a status of its own
        return report_finished(folder, name, "finished")
    if status in STOPPED:
        print(f"stopped {name} by a signal; start the same command again to continue", flush=True)
        return math.nan
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    message = next((line.strip() for line in reversed(lines) if line.strip()), f"ended with status {status}")
    write_json(folder / FAILURE, {"status": status, "message": message})
    print(f"FAILED  {name}: {message} (status {status}, {log})", flush=True)
    return math.nan


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[TextIO | None]:
    """Locks the run's folder against other processes of sweeps; None if another one holds the lock.

    The training process inherits the lock, so that it also keeps out those that start after its sweep was killed. The
    lock that it takes itself comes seconds later, when it has imported torch.

    Raises:
        OSError: the file system has no locks.
    """
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield None
        else:
            yield file


def spawn(arguments: list[str], log: Path, lock: TextIO) -> int:
    """Runs a process with its output in `log` and returns its exit status. The end of this process ends it.

    On POSIX the process inherits the lock.
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
        except BaseException:
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
