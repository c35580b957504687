"""A lock between processes: a file next to what is locked, which names the process that holds it."""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

POLL_SECONDS = 0.1
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of a file system without locks
LOCKED_BYTE = 1 << 20  # on Windows a locked byte cannot be read, so it lies behind the text


@contextlib.contextmanager
def locked(path: Path, task: str) -> Iterator[None]:
    """Holds the lock of `path`, which need not exist. If another process holds it, says so in one line and waits.

    A process that ends in any way releases its locks. Where the file system has no locks, nothing is locked.

    Args:
        task: what the holder of the lock does, for that line.
    """
    try:
        lock = _waited_for(lock_file(path), task)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        lock = contextlib.nullcontext()
    with lock:
        yield


@contextlib.contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Holds the lock of `path` if no other process holds it; yields whether that is so.

    Raises:
        OSError: the lock cannot be used.
    """
    lock = _acquired(lock_file(path))
    with lock or contextlib.nullcontext():
        yield lock is not None


def lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _waited_for(path: Path, task: str) -> contextlib.ExitStack:
    is_waiting = False
    while (lock := _acquired(path)) is None:
        if not is_waiting:
            print(f"waiting for {_holder(path)}, {task}", file=sys.stderr, flush=True)
            is_waiting = True
        time.sleep(POLL_SECONDS)
    return lock


def _acquired(path: Path) -> contextlib.ExitStack | None:
    """Releases the lock and removes its file when it is closed; None: another process holds the lock.

    Raises:
        OSError: the file cannot be created, or not be locked.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open(path))
        try:
            if not try_lock(file) or not _is_at(file, path):
                return None
        except OSError:
            _remove(path)
            raise
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the name
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
        stack.callback(_remove, path)  # before the file is closed, which releases the lock
        return stack.pop_all()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("a+b")
    except PermissionError:  # the file of another user, which can still be locked
        return path.open("rb")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # Windows does not remove open files; an unlocked file that remains is harmless
        path.unlink()


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the lock file is still the one at `path`: the process that held the lock before may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def try_lock(file: IO) -> bool:
    """Locks the file until all its descriptors are closed; False if another process holds the lock.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace") or "another process"
    return "another process"
