"""The lock of a run: only one process at a time trains in a folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tril.data.cache_locks import NO_LOCKS, locked_if_free

RUN_LOCK = ".run.lock"  # in the folder of a run, while it trains


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Locks the folder of a run, which is created, while the block trains it. A file system may have no locks.

    Raises:
        ValueError: another process trains it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            try:
                is_free = stack.enter_context(locked_if_free(folder / "run"))
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                is_free = True
            if not is_free:
                raise ValueError(f"another process trains the run in {folder}; wait for its end, or stop it")
            yield
    finally:
        with contextlib.suppress(OSError):  # the run has written files
            folder.rmdir()
