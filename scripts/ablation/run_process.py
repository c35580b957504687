"""One run of a sweep: an ordinary run in a separate process and folder.

A crash then ends one run and not the sweep, and no run sees memory, compiled code or random numbers of another one.
Every launcher (Hydra's own loop, joblib, Slurm) calls `run_job` once for each run.
"""

import contextlib
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from tril.model.atomic_files import write_json
from tril.model.runs import CHECKPOINTS, FAILURE, SWEEP, state_of
from tril.scripts.ablation.sweep_files import read_json, read_summary
from tril.scripts.common.cli import UserError, command, quoted, task_overrides
from tril.scripts.common.formats import clock

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM)  # exit status of a run that a signal stopped
LOCK_POLL_SECONDS = 0.5


def in_sweep() -> bool:
    """Whether this process is a job of `train.py -m`."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def check_single() -> None:
    """Raises UserError for an ablation without -m, which would silently train its base configuration alone."""
    params = HydraConfig.get().sweeper.get("params") or {} if HydraConfig.initialized() else {}
    chosen = {override.partition("=")[0].lstrip("+") for override in task_overrides()}
    if params and not chosen & params.keys():
        remedy = f"run it with {command('train')} -m, or choose a value, such as {next(iter(params))}=..."
        raise UserError(f"the ablation is a grid over {', '.join(params)}; {remedy}")


def run_job() -> float:
    """Trains the run of this Hydra job unless it is finished.

    Returns:
        Its validation loss; NaN if it failed, was stopped or is left out.
    """
    settings = HydraConfig.get()
    sweep, overrides = Path(settings.sweep.dir), task_overrides()
    if not (sweep / SWEEP).is_file():  # a sweeper that chooses its runs one after another
        folder = Path(settings.runtime.output_dir)
        return train(folder, overrides, folder.name)
    entries = read_json(sweep / SWEEP)["cells"]
    entry = next((entry for entry in entries if entry["overrides"] == overrides), None)
    if entry is None:  # an invalid run that sweep.skip_invalid left out
        return math.nan
    folder = sweep / entry["folder"]
    if state_of(folder) == "finished":
        return read_summary(folder)["final_val_loss"]
    try:
        loss = train(folder, overrides, entry["folder"])
    except KeyboardInterrupt:
        print("\ninterrupted; start the same command again to continue", flush=True)
        sys.exit(128 + signal.SIGINT)
    left = time_left(sweep, entries)
    print(f"{progress(sweep, entries)}{f', about {left} of computing left' if left else ''}", flush=True)
    return loss


def train(folder: Path, overrides: list[str], name: str) -> float:
    """Runs the training process to its end, from the last checkpoint if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, name) as lock:
        if state_of(folder) == "finished":
            return report_finished(folder, name, "was finished before")
        (folder / FAILURE).unlink(missing_ok=True)
        if (folder / CHECKPOINTS / "last.ckpt").is_file():
            allowed = [text for text in overrides if text.startswith("allow_targets=")]  # never read from a folder
            arguments = [quoted(f"resume={folder}", ("resume",)), *allowed]
        else:  # without a checkpoint, nothing in the folder is of use
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            arguments = [*overrides, quoted(f"hydra.run.dir={folder}", ("hydra.run.dir",))]
        print(f"start   {name}", flush=True)
        log = folder / "log.txt"
        # -P: modules in the working directory do not shadow installed ones
        status = spawn([sys.executable, "-P", "-m", "tril.train", *arguments], log, lock)
        if status == 0 and state_of(folder) == "finished":
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
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        if not try_lock(lock):
            print(f"wait    {name}: another process is training it", flush=True)
            while not try_lock(lock):
                time.sleep(LOCK_POLL_SECONDS)
        yield lock


def try_lock(file: TextIO) -> bool:
    """Locks the file until all its descriptors are closed; False if another process holds the lock."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
    summary = read_summary(folder)
    loss, bpb = summary["final_val_loss"], summary["final_val_bpb"]
    figures = f"{loss:.4f} nats per token, {bpb:.4f} bits per byte, {clock(summary['seconds'])}"
    print(f"done    {name} {how}: {figures}", flush=True)
    return loss


def progress(sweep: Path, entries: list[dict]) -> str:
    """How many runs of the sweep are finished and failed."""
    states = [state_of(sweep / entry["folder"]) for entry in entries]
    failed = f", {states.count('failed')} failed" if "failed" in states else ""
    return f"        {states.count('finished')} of {len(entries)} runs are finished{failed}"


def time_left(sweep: Path, entries: list[dict]) -> str | None:
    """Estimated time of the unfinished runs, scaled by actual / estimated time of the finished ones."""
    estimated, actual, left = 0.0, 0.0, 0.0
    for entry in entries:
        seconds = entry["estimated_seconds"]
        if seconds is None:
            return None
        if state_of(sweep / entry["folder"]) == "finished":
            estimated += seconds
            actual += read_summary(sweep / entry["folder"])["seconds"]
        else:
            left += seconds
    return clock(left * actual / estimated) if left and estimated else None


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
