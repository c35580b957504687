"""Locks on files, which end with the process that holds them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

RUN_LOCK = ".lock"  # in the folder of a run, while it trains


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


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Locks the folder of a run, which is created, while the block trains it.

    Raises:
        ValueError: another process trains it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_LOCK
    while True:
        with path.open("a", encoding="utf-8") as lock:
            if not try_lock(lock):
                raise ValueError(f"another process trains the run in {folder}; wait for its end, or stop it")
            if not _is_at(lock, path):  # its owner has removed it since it was opened
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # Windows does not remove an open file; the folder may have others
                    path.unlink()
                    folder.rmdir()
            return


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
