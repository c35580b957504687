"""Trains the pairs of runs of a comparison, one run after the other."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tril.model.atomic_files import write_json
from tril.model.runs import FAILURE, state_of
from tril.scripts.cli.errors import UserError
from tril.scripts.experiments.run_process import train
from tril.scripts.experiments.sweep import Run, read_json
from tril.scripts.trials.arms import CERTIFIED, Arm, runs_folder

WALL_SECONDS = "wall_seconds"  # of a run, with the start of its process


def train_pair(arms: tuple[Arm, Arm], root: Path, pair: int, seed: int) -> tuple[Run, Run]:
    """Trains both runs of a pair that are not finished. The arm that goes first alternates.

    Raises:
        UserError: a run failed, or it carries no certificate.
    """
    runs = {}
    for i in (0, 1) if pair % 2 == 0 else (1, 0):
        runs[i] = train_run(arms[i], root, seed)
    return runs[0], runs[1]


def run_folder_of(arm: Arm, root: Path, seed: int) -> Path:
    return runs_folder(root, arm) / f"seed={seed}"


def train_run(arm: Arm, root: Path, seed: int) -> Run:
    """Trains one run of an arm unless it is finished.

    Raises:
        UserError: it failed, or it carries no certificate.
    """
    folder, name = run_folder_of(arm, root, seed), f"{arm.name} seed={seed}"
    if not folder.parent.is_dir():
        folder.parent.mkdir(parents=True)
        write_json(folder.parent / "arm.json", arm.to_dict(root))
    with timed(folder):
        train(folder, [*arm.overrides, f"seed={seed}"], name, program=(sys.executable, str(arm.tree.folder.resolve())))
    state = state_of(folder)
    if state == "failed":
        failure = read_json(folder / FAILURE)
        message = str(failure["message"]).removeprefix("error: ")
        raise UserError(f"{name} failed with status {failure['status']}: {message} ({folder / 'log.txt'})")
    if state != "finished":
        raise UserError(f"{name} was stopped by a signal; start the same command again to continue")
    run = Run(folder, seed, read_json(wall_file(folder)))
    certificate = run.summary.get("causality")
    if certificate != "certified":
        raise UserError(f"{name}: its causality certificate is {certificate!r}; {CERTIFIED}")
    return run


@contextlib.contextmanager
def timed(folder: Path) -> Iterator[None]:
    """Adds the seconds of the block to those of the run, unless it is finished already."""
    path = wall_file(folder)
    before = float(read_json(path)[WALL_SECONDS]) if path.is_file() else 0.0
    if path.is_file() and state_of(folder) == "finished":
        yield
        return
    started = time.monotonic()
    try:
        yield
    finally:
        write_json(path, {WALL_SECONDS: before + time.monotonic() - started})


def wall_file(folder: Path) -> Path:
    """Outside of the run's folder, which is emptied when a run starts again."""
    return folder.with_name(f"{folder.name}.json")
