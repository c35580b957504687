"""One run of a sweep: an ordinary run in a separate process and folder.

A crash then ends one run and not the sweep, and no run sees memory, compiled code or random numbers of another one.
"""

import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from tril.model.atomic_files import write_json
from tril.model.formats import clock, figures
from tril.model.runs import FAILURE, is_resumable, state_of
from tril.scripts.experiments.sweep import Run

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM)  # exit status of a run that a signal stopped
GIVEN = re.compile(r"[+~]*(logger=|(callbacks|logger)\.)")  # a `_target_` is not saved with a run
# -P: modules in the working directory do not shadow installed ones
PROGRAM = (sys.executable, "-P", "-m", "tril.train")


def train(folder: Path, arguments: Sequence[str], name: str) -> float:
    """Runs the training process to its end, from the last checkpoint if there is one.

    Waits while another process of a sweep trains the same run.

    Returns:
        Its validation loss; NaN if it failed or was stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, status, how = folder / "log.txt", 0, "was finished before"
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if state_of(folder) != "finished":
            words = words_of(folder, arguments)
            print(f"start   {name}", flush=True)
            status, how = spawn([*PROGRAM, *words], log), "finished"
        if summary := Run(folder, 0).summary:  # also if it diverged, which ends with a status of its own
            found = summary.get("diverged") or figures(summary, "final_val_")
            print(f"done    {name} {how}: {found}, {clock(summary['seconds'])}", flush=True)
            return summary["final_val_loss"]
        if status in STOPPED:
            print(f"stopped {name} by a signal; start the same command again to continue", flush=True)
            return math.nan
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        message = next((line.strip() for line in reversed(lines) if line.strip()), f"ended with status {status}")
        write_json(folder / FAILURE, {"status": status, "message": message})
    print(f"FAILED  {name}: {message} (status {status}, {log})", flush=True)
    return math.nan


def words_of(folder: Path, arguments: Sequence[str]) -> list[str]:
    """The arguments that continue or start the run. Without a checkpoint, nothing in the folder is of use."""
    (folder / FAILURE).unlink(missing_ok=True)
    if is_resumable(folder):
        return [f"resume={folder}", *(text for text in arguments if GIVEN.match(text))]
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [*arguments, f"hydra.run.dir={folder}"]


def spawn(arguments: list[str], log: Path) -> int:
    """Runs a process with its output in `log` and returns its exit status. A signal that ends this process ends it."""

    def stop(signum, frame):
        print("\nstopped by SIGTERM; start the same command again to continue", flush=True)
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, stop)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)
