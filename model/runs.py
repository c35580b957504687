"""Where runs lie on disk: a folder each, below outputs/ (single runs) and multirun/ (grids) of the working directory.

Free of torch, so that an entry point can look before it loads anything.
"""

from pathlib import Path

ROOTS = ("outputs", "multirun")
CHECKPOINTS = "checkpoints"


def find_checkpoint(path: str | Path, *, prefer: tuple[str, ...] = ("best", "last")) -> Path:
    """The checkpoint file meant by `path`: a file, a run's folder, or "latest" (the newest below outputs/ and multirun/).

    In a folder the first of `prefer` that exists is taken. Raises FileNotFoundError with what was looked for.
    """
    if str(path) == "latest":
        found = [file for root in ROOTS for name in prefer for file in Path(root).rglob(f"{CHECKPOINTS}/{name}.ckpt")]
        if not found:
            raise FileNotFoundError(f"no checkpoint below {' or '.join(f'{root}/' for root in ROOTS)} of {Path.cwd()}; train first, or name a file")
        path = run_folder(max(found, key=lambda file: file.stat().st_mtime))
    path = Path(path)
    if path.is_file():
        return path
    names = [f"{CHECKPOINTS}/{name}.ckpt" for name in prefer] + [f"{name}.ckpt" for name in prefer]
    for name in names:
        if (path / name).is_file():
            return path / name
    if path.is_dir():
        raise FileNotFoundError(f"{path} holds no {' or '.join(names[: len(prefer)])}; name a checkpoint file or a run's folder")
    raise FileNotFoundError(f"{path} does not exist; name a checkpoint file, a run's folder or latest")


def run_folder(checkpoint: Path) -> Path:
    """The run that a checkpoint file belongs to."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent
