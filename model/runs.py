"""Where runs are stored: one folder each, below outputs/ (single runs) and multirun/ (sweeps) of the working directory.

This module does not import torch, so that an entry point can check paths before it loads anything.
"""

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

ROOTS = ("outputs", "multirun")
CHECKPOINTS = "checkpoints"  # the folder in that of a run, with the next three files
LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
SETTINGS = "config.yaml"  # written when a run starts
SUMMARY = "summary.json"  # written last: a run with this file is finished
FAILURE = "failed.json"  # how a run of a sweep failed
SWEEP = "sweep.json"  # the runs of a sweep, in its folder


def find_checkpoint(path: str | Path, *, prefer: tuple[str, ...] = ("best", "last")) -> Path:
    """Finds the checkpoint file that a user means.

    Args:
        path: a file, the folder of a run, or "latest": the newest run below outputs/ and multirun/. "~" is expanded.
        prefer: names of checkpoints; the first that exists in a folder is taken.

    Raises:
        FileNotFoundError: there is none.
    """
    if str(path) == "latest":
        files = [file for root in ROOTS for name in prefer for file in Path(root).rglob(f"{CHECKPOINTS}/{name}.ckpt")]
        if not files:
            roots = " or ".join(f"{root}/" for root in ROOTS)
            raise FileNotFoundError(f"no checkpoint below {roots} of {Path.cwd()}; train first, or name a file")
        path = run_folder(_newest(files))
    path = _expanded(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; name a checkpoint file, a run's folder or latest")
    names = [f"{CHECKPOINTS}/{name}.ckpt" for name in prefer] + [f"{name}.ckpt" for name in prefer]
    for name in names:
        if (path / name).is_file():
            return path / name
    expected = " or ".join(names[: len(prefer)])
    raise FileNotFoundError(f"{path} contains no {expected}; name a checkpoint file or a run's folder")


def newest_run() -> Path:
    """The folder of the run below outputs/ and multirun/ that was started or resumed last, with or without checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    if not (files := [file for root in ROOTS for file in Path(root).rglob(SETTINGS)]):
        roots = " or ".join(f"{root}/" for root in ROOTS)
        raise FileNotFoundError(f"no run below {roots} of {Path.cwd()}; train first, or name the folder of a run")
    return _newest(files).parent


def find_sweep(path: str) -> Path:
    """Finds the folder of a sweep.

    Args:
        path: the folder, in which "~" is expanded, or "latest": the one below multirun/ with the newest sweep.json.

    Raises:
        FileNotFoundError: "latest" finds none.
    """
    if path != "latest":
        return _expanded(path)
    root = ROOTS[1]
    if not (files := list(Path(root).rglob(SWEEP))):
        message = f"no {SWEEP} below {root}/ of {Path.cwd()}; start a sweep (python train.py -m ...), or name a folder"
        raise FileNotFoundError(message)
    return _newest(files).parent


def _expanded(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))  # unlike Path.expanduser, it leaves the home of an unknown user unchanged


def _newest(files: Iterable[Path]) -> Path:
    return max(files, key=lambda file: file.stat().st_mtime)


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that wrote a checkpoint file."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def new_folder(root: str) -> Path:
    """Creates root/DATE/TIME for the current time, with a suffix where another run started in the same second."""
    now, number = datetime.now(), 1
    while True:
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(root, f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}{suffix}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def state_of(folder: str | Path) -> str:
    """State of a run: finished, failed, unfinished (running or interrupted) or not started."""
    folder = Path(folder)
    if (folder / SUMMARY).is_file():
        return "finished"
    if (folder / FAILURE).is_file():
        return "failed"
    return "unfinished" if folder.is_dir() else "not started"


def partial_validation(windows: dict[str, int] | None) -> str | None:
    """Such as "16 of 1,110 windows", if not the whole validation part was scored.

    Args:
        windows: `val_windows` of a summary.json; None: a run of an older version.
    """
    if windows is None or windows["scored"] == windows["of"]:
        return None
    return f"{windows['scored']:,} of {windows['of']:,} windows"


def relocate(value: Any, old: str, new: str) -> Any:
    """A copy of the plain containers in `value` in which every path in folder `old` points to folder `new`."""
    if isinstance(value, dict):
        return {relocate(key, old, new): relocate(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [relocate(item, old, new) for item in value]
    inside = isinstance(value, str) and (value == old or value.startswith(old + os.sep))
    return new + value[len(old) :] if inside else value


def remove_if_empty(folder: Path) -> None:
    """Removes the folder of a run if it is empty, and those above it that Hydra made below outputs/."""
    for path in (folder, *folder.parents[:2]):
        ours = path == folder or path.absolute().is_relative_to(Path(ROOTS[0]).absolute())
        if ours and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
