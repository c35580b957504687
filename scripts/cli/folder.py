"""The folder of a run: chosen and created when its settings are right, and locked while the run trains."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tril.model.atomic_files import remove_leftovers
from tril.model.runs import (
    BEST,
    CHECKPOINTS,
    LOCK,
    METRICS,
    ROOTS,
    SETTINGS,
    SUMMARY,
    SWEEP,
    Run,
    new_folder,
    remove_if_empty,
    run_folder,
)
from tril.scripts.cli.errors import UserError, check_writable
from tril.scripts.cli.process import process_rank, shared_folder

CONTINUED_FILES = (METRICS, "samples.txt", "windows_best.npz", f"{CHECKPOINTS}/{BEST}")  # in another folder
OF_A_RUN = (SETTINGS, SUMMARY, CHECKPOINTS, METRICS)


def check_folder(chosen: str | None, resumed: Path | None) -> None:
    """Raises ValueError or OSError if a run cannot be in the folder that hydra.run.dir chooses."""
    if chosen is None or process_rank() > 0:
        return
    if not chosen:
        raise ValueError("hydra.run.dir='' is no folder; name one, or leave it out")
    folder = Path(chosen)
    check_writable(folder, "hydra.run.dir")
    if any((folder / name).exists() for name in OF_A_RUN) and resumed is None:
        remedy = f"continue it with resume={folder}, or choose another folder"
        raise ValueError(f"hydra.run.dir={folder} has a run; {remedy}")


@contextlib.contextmanager
def open_run(chosen: str | None, resumed: Path | None) -> Iterator[Run]:
    """Creates and locks the folder of a run for the block.

    Args:
        chosen: hydra.run.dir; None: the folder of the resumed run, or a new one below outputs/.
        resumed: the checkpoint that the run goes on from.
    """

    def create() -> Path:
        if chosen is None and resumed is None:
            return new_folder(ROOTS[0])
        folder = Path(chosen) if chosen is not None else run_folder(resumed)  # pyright: ignore[reportArgumentType]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    with shared_folder(create) as folder, contextlib.ExitStack() as stack:
        run = Run(folder.absolute())
        if process_rank() == 0:
            stack.enter_context(run.lock())
            for place in (folder, folder / CHECKPOINTS, (folder / METRICS).parent):
                remove_leftovers(place)
        try:
            yield run
        except UserError:  # a run that was refused leaves nothing
            if process_rank() == 0 and {path.name for path in folder.iterdir()} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                remove_if_empty(folder)
            raise


def take_files(run: Run, resumed: Path | None, *, work_left: bool) -> None:
    """A run that goes on in another folder takes its files with it.

    Args:
        work_left: steps are left to train, so summary.json, which marks a finished run, goes.
    """
    if resumed is None:
        return
    source = run_folder(resumed)
    for name in CONTINUED_FILES if source.resolve() != run.folder.resolve() else ():
        if (source / name).is_file() and not (run.folder / name).exists():
            (run.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, run.folder / name)
    if work_left:
        (run.folder / SUMMARY).unlink(missing_ok=True)


def sweep_of(folder: Path) -> Path | None:
    """The folder of the sweep that a run belongs to; the trials of +tune=lr are two folders deeper than its runs."""
    return next((parent for parent in folder.absolute().parents[:3] if (parent / SWEEP).is_file()), None)
