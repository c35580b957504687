"""The lock of a run: only one process at a time trains in a folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

RUN_LOCK = ".run.lock"  # in the folder of a run, while it trains


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Locks the folder of a run, which is created, while the block trains it.

    Raises:
        ValueError: another process trains it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / RUN_LOCK)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise ValueError(f"another process trains the run in {folder}; wait for its end, or stop it") from error
        yield
    finally:
        if lock.is_locked:
            (folder / RUN_LOCK).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # the run has written files
            folder.rmdir()
