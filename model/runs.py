"""Where runs lie on disk: a folder each, below outputs/ (single runs) and multirun/ (grids) of the working directory.

Free of torch, so that an entry point can look before it loads anything.
"""

import contextlib
import itertools
import os
from datetime import datetime
from pathlib import Path

ROOTS = ("outputs", "multirun")
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"  # written last: where it is, the run is finished
FAILURE = "failed.json"  # of a cell of a sweep: how it ended
SWEEP = "sweep.json"  # the cells of a sweep, in its folder


def find_checkpoint(path: str | Path, *, prefer: tuple[str, ...] = ("best", "last")) -> Path:
    """The checkpoint file meant by `path`: a file, a run's folder, or "latest" (the newest below outputs/ and multirun/).

    In a folder the first of `prefer` that exists is taken. Raises FileNotFoundError with what was looked for.
    """
    if str(path) == "latest":
        found = [file for root in ROOTS for name in prefer for file in Path(root).rglob(f"{CHECKPOINTS}/{name}.ckpt")]
        if not found:
            raise FileNotFoundError(
                f"no checkpoint below {' or '.join(f'{root}/' for root in ROOTS)} of {Path.cwd()}; train first, or name a file"
            )
        path = run_folder(max(found, key=lambda file: file.stat().st_mtime))
    path = Path(path)
    if path.is_file():
        return path
    names = [f"{CHECKPOINTS}/{name}.ckpt" for name in prefer] + [f"{name}.ckpt" for name in prefer]
    for name in names:
        if (path / name).is_file():
            return path / name
    if path.is_dir():
        raise FileNotFoundError(
            f"{path} holds no {' or '.join(names[: len(prefer)])}; name a checkpoint file or a run's folder"
        )
    raise FileNotFoundError(f"{path} does not exist; name a checkpoint file, a run's folder or latest")


def find_sweep(path: str) -> Path:
    """The folder of a sweep meant by `path`; "latest" is the one below multirun/ whose sweep.json is newest.

    Raises FileNotFoundError where there is none.
    """
    if path != "latest":
        return Path(path)
    found = list(Path(ROOTS[1]).rglob(SWEEP))
    if not found:
        raise FileNotFoundError(
            f"no {SWEEP} below {ROOTS[1]}/ of {Path.cwd()}; start one (python train.py -m ...), or name a folder"
        )
    return max(found, key=lambda file: file.stat().st_mtime).parent


def run_folder(checkpoint: Path) -> Path:
    """The run that a checkpoint file belongs to."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def new_folder(root: str) -> Path:
    """Makes root/DATE/TIME of now; runs that begin in the same second get one each."""
    now = datetime.now()
    for suffix in itertools.chain([""], map("-{}".format, itertools.count(2))):
        folder = Path(root, f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}{suffix}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def state_of(folder: str | Path) -> str:
    """finished | failed | unfinished (running, or interrupted) | not started: what lies in a run's folder."""
    folder = Path(folder)
    if (folder / SUMMARY).is_file():
        return "finished"
    if (folder / FAILURE).is_file():
        return "failed"
    return "unfinished" if folder.is_dir() else "not started"


def moved(value, old: str, new: str):
    """The plain containers `value` with `new` in the place of the folder `old` in every path."""
    if isinstance(value, dict):
        return {moved(key, old, new): moved(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [moved(item, old, new) for item in value]
    inside = isinstance(value, str) and (value == old or value.startswith(old + os.sep))
    return new + value[len(old) :] if inside else value
