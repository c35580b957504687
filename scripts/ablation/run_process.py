"""One cell of a sweep: a run like any other, in a process and a folder of its own.

Its own process, so that a crash ends one cell and not the sweep, and so that memory, compiled code and random numbers of one cell are no
part of the next. Whatever launches the cells (Hydra's own loop, joblib, Slurm) calls `run_cell` once for each.
"""

import contextlib
import fcntl
import json
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

from tril.model.files import write_json
from tril.model.runs import CHECKPOINTS, FAILURE, SUMMARY, SWEEP, state_of
from tril.scripts.common.cli import UserError, quoted, task_overrides

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def in_sweep() -> bool:
    """Whether this call is a cell of `train.py -m`."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def check_single() -> None:
    """Raises UserError where a ready grid is named without -m, which would train its base alone and look like more."""
    params = HydraConfig.get().sweeper.get("params") or {} if HydraConfig.initialized() else {}
    chosen = {override.partition("=")[0].lstrip("+") for override in task_overrides()}
    if params and not chosen & params.keys():
        remedy = f"run it with python train.py -m, or choose a value, such as {next(iter(params))}=..."
        raise UserError(f"the ablation is a grid over {', '.join(params)}; {remedy}")


def run_cell() -> float:
    """Trains the cell that Hydra asks for, unless it is finished, and returns its validation loss; nan where it failed or may not run."""
    settings = HydraConfig.get()
    sweep, overrides = Path(settings.sweep.dir), task_overrides()
    if not (sweep / SWEEP).is_file():  # another sweeper than the grid, one that chooses its cells as it goes
        folder = Path(settings.runtime.output_dir)
        return train(folder, overrides, folder.name)
    cells = json.loads((sweep / SWEEP).read_text(encoding="utf-8"))["cells"]
    cell = next((cell for cell in cells if cell["overrides"] == overrides), None)
    if cell is None:  # an illegal one, with sweep.skip_invalid
        return math.nan
    if state_of(sweep / cell["folder"]) == "finished":  # which the list at the beginning says
        return json.loads((sweep / cell["folder"] / SUMMARY).read_text(encoding="utf-8"))["final_val_loss"]
    try:
        loss = train(sweep / cell["folder"], overrides, cell["folder"])
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", flush=True)
        sys.exit(128 + signal.SIGINT)
    left = time_left(sweep, cells)
    print(f"{progress(sweep, cells)}{f', about {left} of computing left' if left else ''}", flush=True)
    return loss


def train(folder: Path, overrides: list[str], name: str) -> float:
    """Runs the cell to its end: from its last checkpoint where it was interrupted, else from the start."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, name) as lock:
        if state_of(folder) == "finished":
            return report(folder, name, "was finished before")
        (folder / FAILURE).unlink(missing_ok=True)
        if (folder / CHECKPOINTS / "last.ckpt").is_file():
            arguments = [quoted(f"resume={folder}", ("resume",))]
        else:  # nothing of it can be used
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            arguments = [*overrides, quoted(f"hydra.run.dir={folder}", ("hydra.run.dir",))]
        print(f"start   {name}", flush=True)
        status = spawn([sys.executable, str(TRAIN), *arguments], folder / "log.txt", lock)
        if status == 0 and state_of(folder) == "finished":
            return report(folder, name, "finished")
        message = last_line(folder / "log.txt") or f"ended with status {status}"
        write_json(folder / FAILURE, {"status": status, "message": message})
    print(f"FAILED  {name}: {message} (status {status}, {folder / 'log.txt'})", flush=True)
    return math.nan


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[TextIO]:
    """Keeps others out of the cell's folder, among them its own process of a sweep that was killed and is still at work."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"wait    {name}: another process is at work on it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def spawn(command: list[str], log: Path, lock: TextIO) -> int:
    """Runs the command, its output in `log`, and returns its exit status. It holds the lock as long as it lives, whatever becomes of us."""

    def stop(signum, frame):
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=(lock.fileno(),)
        )
        try:
            return process.wait()
        except BaseException:  # whoever ends the sweep ends its cell
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def report(folder: Path, name: str, how: str) -> float:
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    loss, bpb = summary["final_val_loss"], summary["final_val_bpb"]
    print(
        f"done    {name} {how}: {loss:.4f} nats per token, {bpb:.4f} bits per byte, {clock(summary['seconds'])}",
        flush=True,
    )
    return loss


def progress(sweep: Path, cells: list[dict]) -> str:
    states = [state_of(sweep / cell["folder"]) for cell in cells]
    failed = f", {states.count('failed')} failed" if "failed" in states else ""
    return f"        {states.count('finished')} of {len(cells)} cells are finished{failed}"


def time_left(sweep: Path, cells: list[dict]) -> str | None:
    """Estimated for the cells that are not finished, corrected by how wrong the estimates of the finished ones were; None without any."""
    estimated, real, left = 0.0, 0.0, 0.0
    for cell in cells:
        seconds = cell["estimated_seconds"]
        if seconds is None:
            return None
        if state_of(sweep / cell["folder"]) == "finished":
            estimated += seconds
            real += json.loads((sweep / cell["folder"] / SUMMARY).read_text(encoding="utf-8"))["seconds"]
        else:
            left += seconds
    return clock(left * real / estimated) if left and estimated else None


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} days"


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
